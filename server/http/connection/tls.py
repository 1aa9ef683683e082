"""TLS of the server, from the files that its options name."""

from __future__ import annotations

import ssl

from server.options.server_config import ServerConfig


def make_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context for new connections; None if the server speaks no TLS. Raises OSError on unusable files."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        context.load_verify_locations(config.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
