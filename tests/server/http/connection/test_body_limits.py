"""Memory of long bodies goes back to the system, once for many of them."""

import asyncio

import pytest

from server.http.connection import body_limits
from server.http.connection.body_limits import BodyMemory, read_body


async def test_once_for_many_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limits, "TRIM_AFTER", 0.5)
    trims, trimmed = 0, asyncio.Event()

    def trim() -> None:
        nonlocal trims
        trims += 1
        trimmed.set()

    memory = BodyMemory(trim)
    for size in (body_limits.LONG + 1, body_limits.LONG + 1, 10):
        await read(memory, size)
    await trimmed.wait()
    assert trims == 1
    await read(memory, body_limits.LONG)
    await asyncio.sleep(0.02)
    assert trims == 1
    trimmed.clear()
    await read(memory, body_limits.LONG + 1)
    await trimmed.wait()
    assert trims == 2


async def read(memory: BodyMemory, size: int) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": bytes(size), "more_body": False}

    assert len(await read_body(receive, memory)) == size


async def test_the_real_thing_works_here() -> None:
    await read(memory := BodyMemory(), body_limits.LONG + 1)
    memory.trim()
