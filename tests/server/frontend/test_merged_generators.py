"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from server.frontend.merged_generators import STARTED_AT_ONCE, merged


class Source:
    def __init__(self) -> None:
        self.items: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.read = 0
        self.closed = False

    async def stream(self) -> AsyncGenerator[int]:
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                self.read += 1
                yield item
        finally:
            self.closed = True


async def test_items_come_in_their_order_until_all_have_ended() -> None:
    sources = [Source(), Source()]
    found: list[tuple[int, int]] = []
    async with aclosing(merged([source.stream() for source in sources])) as items:
        for index, item in ((1, 10), (0, 20), (1, 30)):
            sources[index].items.put_nowait(item)
            found.append(await anext(items))
        sources[1].items.put_nowait(None)
        sources[0].items.put_nowait(40)
        sources[0].items.put_nowait(None)
        found += [item async for item in items]
    assert found == [(1, 10), (0, 20), (1, 30), (0, 40)]
    assert all(source.closed for source in sources)


async def test_one_error_ends_all() -> None:
    sources = [Source(), Source()]
    sources[1].items.put_nowait(ValueError("broke"))
    with pytest.raises(ValueError, match="broke"):
        await anext(merged([source.stream() for source in sources]))
    assert all(source.closed for source in sources)


async def test_a_slow_reader_holds_the_streams_back() -> None:
    sources = [Source(), Source()]
    for item in range(100):
        sources[0].items.put_nowait(item)
    async with aclosing(merged([source.stream() for source in sources])) as items:
        assert await anext(items) == (0, 0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert sources[0].read < 10
    assert all(source.closed for source in sources)


async def test_other_work_runs_while_many_streams_are_started() -> None:
    """To start a stream may take long: it sends a prompt."""
    started: list[int] = []
    seen: list[int] = []

    async def stream(index: int) -> AsyncGenerator[int]:
        started.append(index)
        yield index

    async def other() -> None:
        while len(started) < 100:
            seen.append(len(started))
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async with aclosing(merged([stream(index) for index in range(100)])) as items:
        assert sorted([item async for _, item in items]) == list(range(100))
    await task
    gaps = [after - before for before, after in zip([0, *seen], [*seen, 100], strict=True)]
    assert max(gaps) <= STARTED_AT_ONCE
