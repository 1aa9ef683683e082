"""Reads a form as far as one of its fields, and gives the whole form to the endpoint all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from tempfile import SpooledTemporaryFile

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from server.errors import ApiError, refused_if_full
from server.http.multipart import FormReader
from server.media.failures import FULL_TEMPORARY

IN_MEMORY = 1 << 20
"""Bytes of a form that are held in memory; a longer one is held in a temporary file."""
_PIECE = 1 << 18
"""Bytes of a form that are given at once."""


@asynccontextmanager
async def peeked_form(
    reader: FormReader, field: str, receive: Receive, most: int, too_large: ApiError
) -> AsyncGenerator[tuple[str | None, Receive]]:
    """Reads a form until `field` has come; yields its value, and what receives the form from its beginning.

    The field of a form that names it behind its file is found at the end. Raises `too_large` behind `most`
    bytes, ClientDisconnect, and a 507 if the disk is full.
    """
    size, more = 0, True
    held = SpooledTemporaryFile[bytes](IN_MEMORY)
    try:
        with refused_if_full(FULL_TEMPORARY):
            while more and not reader.complete and field not in reader.fields:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                data = message.get("body", b"")
                size += len(data)
                if size > most:
                    raise too_large
                reader.push(data)
                await asyncio.to_thread(held.write, data)
                more = message.get("more_body", False)
            await asyncio.to_thread(held.seek, 0)
        yield reader.fields.get(field) or None, _again(held, size, more, receive)
    finally:
        with suppress(OSError):  # a full disk refuses what is left in the buffer once more
            await asyncio.to_thread(held.close)


def _again(held: SpooledTemporaryFile[bytes], size: int, more: bool, receive: Receive) -> Receive:
    """What receives the `size` bytes that are held, and then what still comes, if `more` does."""
    left: int | None = size

    async def receive_again() -> Message:
        nonlocal left
        if left is None:
            return await receive()
        data = await asyncio.to_thread(held.read, _PIECE)
        left = left - len(data) or None
        return {"type": "http.request", "body": data, "more_body": more or left is not None}

    return receive_again
