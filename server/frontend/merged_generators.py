"""Merges several streams into one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

STARTED_AT_ONCE = 16
"""Streams that are started in one turn of the event loop: to start one sends a prompt, which may be long."""


async def merged(streams: list[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yields the items of all streams, each with the index of its stream. The first error ends all.

    All streams are started, a few in each turn of the loop, and closed when this one is.
    """
    # A short queue, so that a slow reader slows the streams down as it would a single one.
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=len(streams))
    tasks: list[asyncio.Task[None]] = []
    try:
        for i, stream in enumerate(streams):
            if i and i % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(_pump(i, stream, queue)))
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[T], queue: asyncio.Queue[tuple[int, T] | BaseException | None]
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
