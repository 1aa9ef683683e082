"""Options of HTTP connections: TLS, certificates of clients, and bounds of what clients send."""

from __future__ import annotations

from typing import Annotated

import msgspec

from worker.option_groups import HTTP
from worker.options import OptionDoc


class ConnectionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of TLS, and of HTTP connections."""

    ssl_keyfile: Annotated[str | None, OptionDoc(HTTP, is_secret=True)] = None
    """Key file, to serve HTTPS."""
    ssl_certfile: Annotated[str | None, OptionDoc(HTTP)] = None
    """Certificate file, to serve HTTPS."""
    ssl_ca_certs: Annotated[str | None, OptionDoc(HTTP)] = None
    """Authorities that must have signed the certificates of clients; with HTTPS only."""
    ssl_cert_reqs: Annotated[int | None, OptionDoc(HTTP, least=0, most=2)] = None
    """Whether clients need a certificate: 0 none, 1 may show one, which must be right, 2 must. Unlike
    vLLM's, 2 by default where --ssl-ca-certs is given."""
    ssl_ciphers: Annotated[str | None, OptionDoc(HTTP)] = None
    """Ciphers for TLS up to 1.2, as OpenSSL writes them. TLS 1.3 has its own."""
    enable_ssl_refresh: Annotated[bool, OptionDoc(HTTP)] = False
    """Reload the files of key, certificate and authorities when they change, for new connections. Without it,
    SIGHUP does so."""
    timeout_keep_alive: Annotated[float, OptionDoc(HTTP, least=0)] = 5.0
    """Seconds from an answer to the next request on a connection, after which it is closed."""
    h11_max_incomplete_event_size: Annotated[int, OptionDoc(HTTP, least=1024, most=16 << 20)] = 64 << 10
    """Maximum bytes of a request's first line and headers together. Unlike vLLM's, not 4 MiB by default."""
    h11_max_header_count: Annotated[int, OptionDoc(HTTP, least=8, most=10_000)] = 100
    """Maximum number of headers of a request. Unlike vLLM's, not 256 by default."""

    @property
    def client_certificates(self) -> int:
        """What is asked of clients, as --ssl-cert-reqs says it."""
        if self.ssl_cert_reqs is None:
            return 0 if self.ssl_ca_certs is None else 2
        return self.ssl_cert_reqs
