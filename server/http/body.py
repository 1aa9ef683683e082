"""Reads the body of a request, within bounds of its size and of the memory of all bodies together.

How long a body may take is watched by its connection (`server/http/connection`).
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from server.errors import TooLarge, Unavailable

MAX_BODY = 16 << 20
MAX_TOGETHER = 256 << 20
"""Bytes of all bodies together that are being read in this process."""
ALWAYS_READ = 64 << 10
"""A body up to so many bytes is read however many others there are: those who hold up long ones delay no
short ones."""
LONG = 1 << 20
"""Bytes of a body above which its memory is given back to the system afterwards."""
TRIM_AFTER = 3.0
"""Seconds from a long body to the search for free memory, which takes up to some hundredths of one."""


def _give_back() -> None:
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):  # only glibc has it
        system.malloc_trim(0)


class BodyMemory:
    """Counts the bytes of the long bodies that are being read, and gives their memory back to the system.

    The heap keeps what is freed between other things: after 256 MiB of bodies it kept nearly all of that.
    """

    def __init__(self, trim_heap: Callable[[], None] = _give_back) -> None:
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


async def read_body(receive: Receive, memory: BodyMemory = BODY_MEMORY, *, most: int | None = None) -> bytes:
    """Returns the whole body. Raises ClientDisconnect if the connection ends before it.

    `most` is the most bytes that are taken of this one, if they are fewer than MAX_BODY.
    """
    most = MAX_BODY if most is None else min(most, MAX_BODY)
    parts: list[bytes] = []
    size = taken = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise body_too_large(most)
            if size > ALWAYS_READ:
                if memory.taken + size - taken > MAX_TOGETHER:
                    raise no_room_for_body()
                memory.taken += size - taken
                taken = size
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)
    finally:
        memory.give_back(taken)


def body_too_large(most: int = MAX_BODY) -> TooLarge:
    return TooLarge(f"The body may have at most {most} bytes: send less text in one request.")


def no_room_for_body() -> Unavailable:
    return Unavailable(
        f"The server is reading as many long requests as it holds at a time, {MAX_TOGETHER >> 20} MiB. Try "
        "again later, or send less text in one request.",
        retry_after=1,
    )
