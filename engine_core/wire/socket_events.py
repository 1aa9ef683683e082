"""What a ZMQ socket tells of its connections, through a socket of its own that is read like any other."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import zmq

INSIDE = zmq.EVENT_HANDSHAKE_SUCCEEDED
LOST = zmq.EVENT_DISCONNECTED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Told right before the LOST of the same connection."""


def events(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """All that have come, each with the number of its connection; never waits."""
    while True:
        try:
            head, _endpoint = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield struct.unpack_from("=HI", head)


def stop(sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    sock.disable_monitor()
    monitor.close(linger=0)
