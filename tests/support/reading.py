"""Tasks that read answers of a frontend, as a test has let them run to their first wait."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from engine_core.protocol import Pooled
from server.frontend.frontend import Delta


async def started(stream: AsyncGenerator[Delta, None]) -> asyncio.Task[list[Delta]]:
    """Starts to read the stream in a task, and lets it run to its first wait."""

    async def read() -> list[Delta]:
        return [delta async for delta in stream]

    task = asyncio.create_task(read())
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def beginning(work: Coroutine[Any, Any, list[Pooled]]) -> asyncio.Task[list[Pooled]]:
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task
