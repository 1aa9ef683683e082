"""The queue of a job: whose turn it is, what may wait, and what becomes of orders whose clients leave."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from helper_job import JOB, Order, Told

from server.errors import ApiError, Overloaded, TooManyRequests
from server.helpers.job import Ended
from server.helpers.job_queue import JobQueue
from server.helpers.messages import sent_error

Open = Callable[..., JobQueue[Told]]


class FakeProcess:
    """Answers each order when it is let."""

    def __init__(self, *_: object) -> None:
        self.asked: list[str] = []
        self.goes_on = asyncio.Event()
        self.starts = self.kills = 0

    async def ask(self, order: bytes, data: bytes) -> bytes:
        do = msgspec.msgpack.decode(order, type=Order).do
        self.asked.append(do)
        await self.goes_on.wait()
        if do == "die":
            raise Ended(1.0, -9)
        if do == "explode":
            raise ZeroDivisionError
        return msgspec.msgpack.encode(Told(do, 1))

    async def start(self) -> None:
        self.starts += 1

    def kill(self) -> None:
        self.kills += 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setattr("server.helpers.job_queue.HelperProcess", FakeProcess)
    return lambda **limits: JobQueue(replace(JOB, **limits), lambda: Order(), "info")


def fake(queue: JobQueue[Told], index: int = 0) -> FakeProcess:
    process: Any = queue.processes[index]
    return process


async def ask(queue: JobQueue[Told], *orders: str, **more: Any) -> list[asyncio.Task[Told]]:
    """Asks for orders, whose owner is their first letter."""
    asked = [asyncio.create_task(queue.ask(Order(do), owner=do[0], **more)) for do in orders]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return asked


async def test_owners_take_turns_however_much_each_asks(opened: Open) -> None:
    queue = opened()
    tasks = await ask(queue, "a1", "a2", "a3", "a4", "b1", "c1", "b2")
    fake(queue).goes_on.set()
    assert [told.text for told in await asyncio.gather(*tasks)] == ["a1", "a2", "a3", "a4", "b1", "c1", "b2"]
    assert fake(queue).asked == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert queue.bytes == 0


async def test_an_owner_waits_within_bounds(opened: Open) -> None:
    queue = opened(owner_waiting=1, waiting_seconds=0.02)
    runs, waits, refused, other = await ask(queue, "a1", "a2", "a3", "b1")
    with pytest.raises(ApiError, match="as many tests of yours") as busy:
        await refused
    assert (busy.value.status, busy.value.code) == (429, "rate_limit_exceeded")
    for each in (waits, other):  # and not for ever
        with pytest.raises(ApiError, match="as many tests of yours"):
            await each
    fake(queue).goes_on.set()
    assert (await runs).text == "a1" and fake(queue).asked == ["a1"]


async def test_all_wait_within_bytes(opened: Open) -> None:
    queue = opened(waiting_bytes=100)
    [alone] = await ask(queue, "a", data=bytes(1000))  # one may be as long as it is
    [refused] = await ask(queue, "b")
    with pytest.raises(Overloaded):
        await refused
    fake(queue).goes_on.set()
    await alone
    assert (await queue.ask(Order("b"))).text == "b"


async def test_the_process_used_last_comes_first(opened: Open) -> None:
    queue = opened(processes=2)
    first, second = fake(queue), fake(queue, 1)
    tasks = await ask(queue, "a", "b")
    assert (first.asked, second.asked) == (["a"], ["b"])
    second.goes_on.set()
    await tasks[1]
    await queue.ask(Order("c"))
    first.goes_on.set()
    await tasks[0]
    await queue.ask(Order("d"))
    assert (first.asked, second.asked) == (["a", "d"], ["b", "c"])


async def test_what_several_ask_is_followed_once(opened: Open) -> None:
    queue = opened()
    same = await ask(queue, "a", "a", "a", digest=b"a")
    waits = await ask(queue, "b", "b", digest=b"b")
    same[0].cancel()
    waits[0].cancel()
    await asyncio.sleep(0)
    fake(queue).goes_on.set()
    assert await same[1] is await same[2]
    await waits[1]
    assert fake(queue).asked == ["a", "b"]
    await queue.ask(Order("a"), digest=b"a")
    assert fake(queue).asked == ["a", "b", "a"]


async def test_who_leaves_takes_along_what_waits_and_not_what_is_begun(opened: Open) -> None:
    queue = opened()
    begun, waits, stays = await ask(queue, "a1", "a2", "b1")
    begun.cancel()
    waits.cancel()
    fake(queue).goes_on.set()
    await stays
    assert (fake(queue).asked, fake(queue).kills, queue.bytes) == (["a1", "b1"], 0, 0)


async def test_a_process_that_ends_is_started_again_at_once(opened: Open) -> None:
    queue = opened()
    dies, next = await ask(queue, "die", "a")
    fake(queue).goes_on.set()
    with pytest.raises(ApiError, match="Send this request again"):
        await dies
    assert (await next).text == "a" and fake(queue).starts == 1
    queue.start()
    await asyncio.sleep(0)
    assert fake(queue).starts == 2


async def test_the_next_order_is_followed_after_one_that_breaks(opened: Open) -> None:
    queue = opened()
    breaks, next = await ask(queue, "explode", "a")
    fake(queue).goes_on.set()
    with pytest.raises(ZeroDivisionError):
        await breaks
    assert (await next).text == "a"


class Bytes(bytearray):
    """Bytes that can have weak references."""


async def test_errors_that_are_sent_are_raised_and_keep_nothing(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> bytes:
        return msgspec.msgpack.encode(sent_error(TooManyRequests("no", "field", retry_after=3)))

    queue, data = opened(), Bytes(10)
    monkeypatch.setattr(fake(queue), "ask", refused)
    gc.disable()
    try:
        with pytest.raises(ApiError) as raised:
            await queue.ask(Order(), data)
        error = raised.value
        assert (error.status, error.message, error.param, error.retry_after) == (429, "no", "field", 3)
        left = weakref.ref(data)
        del data, error, raised
        assert left() is None
    finally:
        gc.enable()


def test_it_can_be_closed_after_the_loop(opened: Open) -> None:
    queue = opened()
    loop = asyncio.new_event_loop()
    task = loop.create_task(queue.ask(Order()))
    loop.run_until_complete(asyncio.sleep(0.01))
    task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    queue.close()
    assert fake(queue).kills == 1
