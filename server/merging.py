"""Merges several streams into one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: list[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yields the items of all streams, each with the index of its stream. The first error ends all.

    All streams are started at once, and closed when this one is.
    """
    # A short queue, so that a slow reader slows the streams down as it would a single one.
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
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
