"""The listening socket: its options, its TLS, and what the system tells of its connections."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import ssl
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from server.http.connection import connection_limits as limits
from server.options.connection_options import ConnectionOptions

_ACKNOWLEDGED = 120
"""The offset of the number of acknowledged bytes in Linux's tcp_info."""

_log = logging.getLogger(__name__)


def set_options(listener: socket.socket) -> None:
    """Lets the system end connections whose client has vanished, and bounds what it keeps for each.

    Accepted connections inherit the options, so that none costs a call. Where a system does not know one,
    its defaults stay.
    """
    if listener.family == socket.AF_UNIX:
        return
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", limits.PROBE_AFTER_SECONDS),
        ("TCP_KEEPINTVL", limits.PROBE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", limits.PROBES),
        ("TCP_USER_TIMEOUT", 1000 * limits.UNACKNOWLEDGED_SECONDS),
        ("TCP_NOTSENT_LOWAT", limits.MAX_UNSENT),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def make_tls_context(options: ConnectionOptions) -> ssl.SSLContext | None:
    """The context for new connections; None if the server speaks no TLS. Raises OSError on unusable files."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _naming("--ssl-certfile and --ssl-keyfile: a certificate and its key as PEM are needed"):
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, _refuse_passphrase)
    if options.ssl_ciphers is not None:
        with _naming("--ssl-ciphers: OpenSSL knows none of these"):
            context.set_ciphers(options.ssl_ciphers)
    if options.ssl_ca_certs is not None:
        with _naming("--ssl-ca-certs: certificates as PEM are needed"):
            context.load_verify_locations(options.ssl_ca_certs)
        context.verify_mode = ssl.VerifyMode(options.client_certificates)
        # A session that is resumed by a ticket is not verified again, not even with other authorities.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _refuse_passphrase() -> str:
    """Called by OpenSSL for the passphrase of a key, for which it would ask at the terminal itself."""
    raise OSError("the key is encrypted: `openssl pkey -in KEY -out NEW` makes one that is not")


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Says in errors of the system which options they are about."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{what}: {error}") from error


class RenewableTls:
    """The TLS context of a listening server, in whose place another one can be put for new connections."""

    def __init__(self, options: ConnectionOptions) -> None:
        """Raises OSError on unusable files."""
        self._options = options
        self.context = self._current = make_tls_context(options)
        """What the server listens with; None if it speaks no TLS."""
        if self.context is not None:
            self.context.sni_callback = self._choose
        self._used = self._seen = self._times()
        """The times of the files that were last used, and of those that were last seen."""

    def reload(self) -> None:
        """Use what the files hold now for new connections, if it is usable."""
        if self.context is None:
            return
        try:
            self._current = make_tls_context(self._options)
        except OSError as error:
            _log.error("the certificate cannot be used, and the old one stays: %s", error)
        else:
            _log.info("new connections get the certificate and authorities that the files hold now")

    def reload_if_changed(self) -> None:
        """The same once the files have changed and have stayed so since the last call: one may come later."""
        seen, self._seen = self._seen, self._times()
        if seen == self._seen != self._used:
            self._used = self._seen
            self.reload()

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called by OpenSSL when a client has begun, before it is shown a certificate."""
        if self._current is not None:
            connection.context = self._current

    def _times(self) -> list[tuple[int, int] | None]:
        """When each file was changed, and which file it is; None for one that is missing."""
        options = self._options
        files = (options.ssl_keyfile, options.ssl_certfile, options.ssl_ca_certs)
        return [_time_of(file) for file in files if file is not None]


def _time_of(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def unread_bytes(transport: asyncio.Transport) -> int:
    """Bytes that were written to a connection and that its client's system has not taken.

    With TLS this leaves out those that are encrypted and that the system has not taken yet.
    """
    waiting = transport.get_write_buffer_size()
    connection = transport.get_extra_info("socket")
    if connection is None:
        return waiting
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return waiting  # it is closed, or the system does not tell
    return waiting + struct.unpack("i", answer)[0]


def bytes_taken(transport: asyncio.Transport) -> int:
    """A number that grows when the client's system takes bytes, while none are written."""
    connection = transport.get_extra_info("socket")
    if connection is not None and hasattr(socket, "TCP_INFO"):
        with suppress(OSError, ValueError, struct.error):  # it is a Unix socket, or closed
            facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED + 8)
            return struct.unpack_from("Q", facts, _ACKNOWLEDGED)[0]
    return -unread_bytes(transport)
