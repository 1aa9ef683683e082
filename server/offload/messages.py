"""Frames and errors between an API process and those that work for it, and how these answer within bounds.

A frame is eight bytes with its length, then the data.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import socket
from collections.abc import Callable
from contextlib import suppress

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
    sentence: str = ""


class ReceivedError(ApiError):
    """Raised for an error that another process has found."""

    def __init__(self, found: SentError) -> None:
        super().__init__(found.message, found.param, retry_after=found.retry_after)
        self.status = found.status
        self.type, self.sentence = found.kind, found.sentence


def sent_error(error: ApiError) -> SentError:
    return SentError(error.status, error.type, error.message, error.param, error.retry_after, error.sentence)


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


def set_most_memory(more: int, *, for_good: bool = False) -> None:
    """Bounds the address space to so many bytes more than it has now."""
    now, _ = _memory()
    if now:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        bound = now + more if most < 0 else min(now + more, most)
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound if for_good else most))


def unset_most_memory() -> None:
    """Goes back to the bound that is for good."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _resident() -> int:
    """The bytes of memory that this process has; 0 where they are not known."""
    return _memory()[1]


def _memory() -> tuple[int, int]:
    """The address space in bytes, and what is resident of it. Both are 0 where the system is not Linux, which
    alone can bound them."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = file.read().split()
    except FileNotFoundError:
        return 0, 0
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def _give_back() -> None:
    """Give the allocator's free memory back to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def answer_questions(
    connection: socket.socket, frames: int, answer: Callable[..., bytes], *, memory: int, much: int, most: int
) -> None:
    """Answers questions of so many frames each until the connection ends, with `memory` bytes more at most.

    After an answer that leaves `much` memory that is given back. One that leaves more than `most`
    is the last, because some libraries give back little.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_most_memory(memory, for_good=True)
    at_rest = _resident()
    connection.sendall(frame(b""))
    while None not in (question := [receive_frame(connection) for _ in range(frames)]):
        connection.sendall(frame(answer(*question)))
        question.clear()
        if _resident() > at_rest + much:
            _give_back()
        if _resident() > at_rest + most:
            return
