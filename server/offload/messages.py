"""What an API process and those that work for it send each other: frames of bytes, and errors.

A frame is eight bytes with its length, then the data.
"""

from __future__ import annotations

import socket

import msgspec

from server.errors import ApiError

LENGTH_BYTES = 8

NO_MEMORY = (
    "Reading this request took more memory than a request may. Send less text, or fewer values, in one."
)


class SentError(msgspec.Struct, frozen=True, tag=True):
    """The error that another process has found, with which a request ends here."""

    status: int
    kind: str
    message: str
    param: str | None
    retry_after: int | None = None


class ReceivedError(ApiError):
    """Raised for an error that another process has found."""

    def __init__(self, found: SentError) -> None:
        super().__init__(found.message, found.param, retry_after=found.retry_after)
        self.status = found.status
        self.type = found.kind


def sent_error(error: ApiError) -> SentError:
    return SentError(error.status, error.type, error.message, error.param, error.retry_after)


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
