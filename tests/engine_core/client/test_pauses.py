"""Answers that are not read: their engine is told, and so is the one that takes over. Questions to it."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import PARAMS, READY, Script, Two

from engine_core.client import dispatcher
from engine_core.protocol import AddRequest, AskStanding, Outputs, Pause, Progress, Resume, Sleep, Standing


async def test_the_engine_of_each_request_is_told_once(two: Two) -> None:
    client, first, second, _ = two
    long, short = client.submit([1] * 60, PARAMS), client.submit([2] * 20, PARAMS)
    client.pause([long.id, short.id, 77])
    client.pause([long.id])
    client.resume([short.id])
    client.resume([short.id, 77])
    assert (await first.received(2))[1:] == [Pause([long.id])]
    assert (await second.received(3))[1:] == [Pause([short.id]), Resume([short.id])]
    client.pause([])
    client.submit([3], PARAMS)
    assert [type(request) for request in await second.received(1)] == [AddRequest]


async def test_an_engine_that_comes_back_before_it_slept_is_told_again(two: Two) -> None:
    client, first, second, both = two
    asleep = asyncio.create_task(client.orders.sleep(1))
    assert await first.received(1) == await second.received(1) == [Sleep(1)]
    both.end(first)
    await both.until(lambda: both.state(0) != "works")
    first = await both.start(0)
    second.send(Progress("asleep", 1.0))
    assert await first.received(1) == [Sleep(1)] and not asleep.done()
    first.send(Progress("asleep", 1.0))
    await asyncio.wait_for(asleep, 20)


async def test_an_engine_that_ends_asleep_sleeps_on_until_it_is_woken(two: Two) -> None:
    client, first, second, both = two

    async def again() -> Script:
        both.end(first)
        await both.until(lambda: both.state(0) != "works")
        return await both.start(0)

    asleep = asyncio.create_task(client.orders.sleep(2))
    for engine in (first, second):
        assert await engine.received(1) == [Sleep(2)]
        engine.send(Progress("asleep", 1.0))
    await asyncio.wait_for(asleep, 20)
    first = await again()
    first = await again()  # before it slept
    assert await first.received(1) == [Sleep(2)]
    first.send(Progress("asleep", 1.0))
    await both.until(lambda: client.replicas[0].asleep)
    woken = asyncio.create_task(client.orders.wake())
    for engine in (first, second):
        assert await engine.received(1) == [Sleep(0)]
        engine.send(READY)
    assert await asyncio.wait_for(woken, 20) == ""
    first = await again()
    client.submit([1], PARAMS, replica=0)
    assert [type(request) for request in await first.received(1)] == [AddRequest]


async def test_who_waits_for_sleep_does_not_wait_for_engines_that_were_woken_meanwhile(two: Two) -> None:
    client, first, second, both = two
    asleep = asyncio.create_task(client.orders.sleep(1))
    assert await first.received(1) == await second.received(1) == [Sleep(1)]
    first.send(Progress("asleep", 1.0))
    await both.until(lambda: client.orders.asleep)
    woken = asyncio.create_task(client.orders.wake())
    assert await first.received(1) == await second.received(1) == [Sleep(0)]
    first.send(READY)
    await both.until(lambda: not client.orders.asleep)
    second.send(Progress("asleep", 1.0), READY)  # it had requests
    assert await asyncio.wait_for(woken, 20) == ""
    await asyncio.wait_for(asleep, 20)


async def test_an_engine_says_how_far_a_request_has_come(two: Two) -> None:
    client, first, *_ = two
    stream = client.submit([1], PARAMS, replica=0)
    asking = asyncio.create_task(client.standing(stream.id))
    assert (await first.received(2))[1] == AskStanding(stream.id)
    first.send(Outputs([Standing(stream.id, 3, 0, 1), Standing(77, 1, 0, 1)]))
    assert await asking == Standing(stream.id, 3, 0, 1)
    first.answer(stream, 5, finish="length")
    assert [output.tokens async for output in stream] == [[5]], "the reader sees nothing of it"


async def test_an_engine_may_have_nothing_to_say(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_STANDING_SECONDS", 0.01)
    client, first, *_ = two
    stream = client.submit([1], PARAMS, replica=0)
    assert await client.standing(stream.id) is None
    first.send(Outputs([Standing(stream.id, 3, 0, 1)]))  # too late
    first.answer(stream, 5, finish="length")
    assert [output.tokens async for output in stream] == [[5]]
    assert await client.standing(stream.id) is None
