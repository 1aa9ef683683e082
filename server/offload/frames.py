"""Frames between an API process and those that work for it: eight bytes with the length, then the data."""

from __future__ import annotations

import socket

LENGTH_BYTES = 8


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def receive_frame(connection: socket.socket) -> bytes | None:
    """The next frame; None at the end of the connection."""
    head = _receive_exactly(connection, LENGTH_BYTES)
    return None if head is None else _receive_exactly(connection, int.from_bytes(head, "little"))


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            return None
        rest = rest[received:]
    return bytes(data)
