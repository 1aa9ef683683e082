"""Reads bodies, each of a bounded length, and all in a bounded memory that goes back to the system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from server.errors import TooLarge, Unavailable
from server.helpers.memory import trim_heap
from server.reading.endpoint_table import TABLE

MAX_BODY = 16 << 20
RECORDINGS = frozenset(path for row in TABLE if row.is_form for path in row.paths)
UPLOADS = RECORDINGS | {"/v1/files", "/v1/messages/batches"}
"""The paths of files, and of batches, which may be longer than other bodies: they go to the disk."""
MOST_MESSAGES = 64 << 20
"""The longest body of a batch of messages, which is held in memory until it is on the disk."""
MAX_TOGETHER = 256 << 20
"""Bytes of all bodies together that are being read in this process."""
ALWAYS_READ = 64 << 10
"""A body up to so many bytes is read however many others there are: those who hold up long ones delay no
short ones."""
LONG = 1 << 20
"""Bytes of a body above which its memory is given back to the system afterwards."""
TRIM_AFTER = 3.0
"""Seconds from a long body to the search for free memory, which takes up to some hundredths of one."""


class BodyMemory:
    """Counts the bytes of the long bodies that are being read, and gives their memory back to the system.

    The heap keeps what is freed between other things: after 256 MiB of bodies it kept nearly all of that.
    """

    def __init__(self, trim_heap: Callable[[], None] = trim_heap) -> None:
        self.taken = 0
        self._trim_heap = trim_heap
        self._trim_is_due = False

    def has_room(self, size: int) -> bool:
        return size <= ALWAYS_READ or self.taken + size <= MAX_TOGETHER

    def give_back(self, size: int) -> None:
        """Count so many bytes no more. Call this in the event loop."""
        self.taken -= size
        if size > LONG and not self._trim_is_due:
            self._trim_is_due = True
            asyncio.get_running_loop().call_later(TRIM_AFTER, self.trim)

    def trim(self) -> None:
        self._trim_is_due = False
        self._trim_heap()


BODY_MEMORY = BodyMemory()


async def read_body(
    receive: Receive, memory: BodyMemory = BODY_MEMORY, *, most: int = MAX_BODY
) -> bytes | bytearray:
    """Returns the whole body, of `most` bytes at most, which is never copied as a whole.

    Raises ClientDisconnect if the connection ends before it.
    """
    body: bytes | bytearray = b""
    size = taken = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            length = len(part)
            size += length
            if size > most:
                raise body_too_large(most)
            if size > ALWAYS_READ:
                if memory.taken + size - taken > MAX_TOGETHER:
                    raise no_room_for_body()
                memory.taken += size - taken
                taken = size
            if size == length:
                body = part
            else:
                body = bytearray(body) if isinstance(body, bytes) else body
                body += part
            if not message.get("more_body", False):
                return body
    finally:
        if taken:
            memory.give_back(taken)


class TakesMedia(Protocol):
    """An object that says how large media may be."""

    @property
    def most_bytes(self) -> int: ...


def most_bytes(media: TakesMedia | None) -> int:
    """The longest body of any endpoint."""
    return MAX_BODY + (0 if media is None else media.most_bytes)


def body_too_large(most: int = MAX_BODY) -> TooLarge:
    less = "less text" if most <= MAX_BODY else "smaller media, of which --max-media-mb is the limit,"
    return TooLarge(f"The body may have at most {most} bytes: send {less} in one request.")


def no_room_for_body() -> Unavailable:
    return Unavailable(
        f"The server is reading as many long requests as it holds at a time, {MAX_TOGETHER >> 20} MiB. Try "
        "again later, or send less text in one request.",
        retry_after=1,
    )
