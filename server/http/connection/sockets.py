"""The listening socket: its options, its TLS, and what the system tells of its connections."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import ssl
import struct
import termios
from contextlib import suppress

from server.http.connection import limits
from server.options.server_config import ServerConfig

_ACKNOWLEDGED = 120
"""The offset of the number of acknowledged bytes in Linux's tcp_info."""


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


def make_tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context for new connections; None if the server speaks no TLS. Raises OSError on unusable files."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        context.load_verify_locations(config.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def expect_stream(transport: asyncio.Transport) -> None:
    """Bounds more closely what waits for the reader of this connection."""
    transport.set_write_buffer_limits(limits.MAX_PENDING_OF_STREAM)
    connection = transport.get_extra_info("socket")
    if hasattr(socket, "TCP_NOTSENT_LOWAT") and connection is not None:
        with suppress(OSError):  # it is a Unix socket
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, limits.MAX_UNSENT_OF_STREAM)


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
