"""Reads the body of a request, within bounds of its size and of the time it may stand still."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from server.errors import TooLarge

MAX_BODY = 16 << 20
BODY_SECONDS = 30
"""How long a body may stand still before it is complete."""


async def read_body(receive: Receive) -> bytes:
    """Returns the whole body. Raises ClientDisconnect if the client leaves before its end."""
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, f"The body stood still for {BODY_SECONDS} seconds.") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            raise body_too_large()
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def body_too_large() -> TooLarge:
    return TooLarge(f"The body may have at most {MAX_BODY} bytes: send less text in one request.")
