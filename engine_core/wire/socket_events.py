"""Events of a ZMQ socket's connections, which come through a socket of their own."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import zmq

CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
DISCONNECTED = zmq.EVENT_DISCONNECTED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""A failed handshake. DISCONNECTED follows for the same connection."""


def events(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """All events that have come, each with the number of its connection; never waits."""
    while True:
        try:
            head, _endpoint = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield struct.unpack_from("=HI", head)


def stop(sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    sock.disable_monitor()
    monitor.close(linger=0)
