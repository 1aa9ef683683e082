"""Requests that wait for a replica: which, for how long, and what ends the wait."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from scripted_engine import PARAMS, Replicated, Script

from engine_core.client.held import HeldRequests
from engine_core.client.in_flight import InFlight
from engine_core.client.streams import Stream
from engine_core.config import Address, Replicas
from engine_core.protocol import DEADLINE, Add, AddMany, Failed, Tokens
from worker.protocol import Pooling


async def alone(address: Address, restart_wait: float = 60) -> tuple[Replicated, Script]:
    found = Replicated(address, Replicas(), restart_wait=restart_wait)
    return found, await found.start(0)


async def two_of(address: Address, restart_wait: float = 60) -> tuple[Replicated, Script, Script]:
    both = Replicated(address, Replicas(size=2, here=2), restart_wait=restart_wait)
    return both, await both.start(0), await both.start(1)


async def ids_received(script: Script, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            for request in await script.received(1):
                if isinstance(request, AddMany):
                    found += [add.id for add in request.adds]
                elif isinstance(request, Add):
                    found.append(request.id)
    return found


async def only(stream: Stream) -> Tokens | Failed:
    async with asyncio.timeout(60):
        [output] = [output async for output in stream]
    return output


async def test_requests_wait_for_the_engine_that_is_started_again(address: Address) -> None:
    found, first = await alone(address)
    sent = found.client.submit([1], PARAMS)
    await first.received(1)
    found.client.engine_exited(0, -9)
    found.end(first)
    streams = [
        sent,
        *found.client.submit_many([([2], Pooling(task="embed"))]),
        found.client.submit([3], PARAMS),
    ]
    assert found.client.open_streams == 3
    again = await found.start(0)
    assert await ids_received(again, 3) == [stream.id for stream in streams], (
        "in the order in which they came"
    )
    again.answer(sent, 5, finish="length")
    assert await only(sent) == Tokens(id=sent.id, tokens=[5], finish="length")
    found.close()


async def test_a_held_request_can_be_aborted(address: Address) -> None:
    found, first = await alone(address)
    found.client.engine_exited(0, -9)
    found.end(first)
    left, stays = found.client.submit([1], PARAMS), found.client.submit([2], PARAMS)
    found.client.abort([left.id])
    assert await only(left) == Tokens(id=left.id, tokens=[], finish="abort")
    assert await ids_received(await found.start(0), 1) == [stays.id]
    found.close()


async def test_what_waits_too_long_is_refused(address: Address) -> None:
    found, _ = await alone(address, restart_wait=0.05)
    found.client.engine_exited(0, -9)
    stream = found.client.submit([1], PARAMS)
    assert await only(stream) == Failed(stream.id, 503, "no engine can take requests now")
    found.close()


async def test_what_may_take_a_short_time_waits_no_longer(address: Address) -> None:
    found, first = await alone(address)
    begun = found.client.submit([1], PARAMS, budget=0.3)
    await first.received(1)
    first.answer(begun, 9)
    async with asyncio.timeout(60):
        assert (await anext(begun)) == Tokens(id=begun.id, tokens=[9])
    found.client.engine_exited(0, -9)
    found.end(first)
    new = found.client.submit([2], PARAMS, wait=0.05, budget=30.0)
    without = found.client.submit([3], PARAMS)
    for stream, code in ((new, 503), (begun, 504)):
        async with asyncio.timeout(60):
            answer = await anext(stream)
        assert isinstance(answer, Failed) and (answer.code, answer.error) == (code, DEADLINE)
    assert found.client.open_streams == 1
    assert await ids_received(await found.start(0), 1) == [without.id]
    found.close()


async def test_nothing_is_held_for_an_engine_that_is_given_up(address: Address) -> None:
    found, _ = await alone(address)
    found.client.engine_exited(0, -9)
    stream = found.client.submit([1], PARAMS)
    found.client.engine_given_up(0, "it broke 5 times", explained=False)
    assert await only(stream) == Failed(stream.id, 503, "it broke 5 times", "engine_given_up")
    found.close()


async def test_a_request_for_one_replica_waits_for_it_alone(address: Address) -> None:
    both, first, _ = await two_of(address)
    both.client.engine_exited(0, -9)
    both.end(first)
    stream = both.client.submit([1], PARAMS, replica=0)
    assert await ids_received(await both.start(0), 1) == [stream.id]
    both.client.engine_exited(0, -9)
    later = both.client.submit([1], PARAMS, replica=0)
    both.client.engine_given_up(0, "it broke 5 times", explained=False)
    for each in (stream, later):
        assert await only(each) == Failed(each.id, 503, "replica 0 takes no requests now")
    both.close()


async def test_a_replica_that_nobody_may_have_is_not_waited_for(address: Address) -> None:
    found, _ = await alone(address)
    stream = found.client.submit([1], PARAMS, replica=7)
    assert await only(stream) == Failed(stream.id, 503, "replica 7 takes no requests now")
    found.close()


class Clock:
    """A loop of which only the clock and the timers are used."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[float] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: object) -> object:
        self.timers.append(when)
        self.callback = callback
        return self

    def advance(self, to: float) -> None:
        self.now = to
        self.callback()  # pyright: ignore


def test_each_waits_for_its_own_time_and_all_share_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, overdue = Clock(), []
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    held = HeldRequests(10.0, overdue.extend)
    first, second, third = (
        InFlight(Add(id, [1], PARAMS), Stream(id, cast("asyncio.AbstractEventLoop", clock)))
        for id in (1, 2, 3)
    )
    held.hold(first)
    clock.now = 4.0
    held.hold(second)
    held.hold(third)
    assert clock.timers == [10.0]
    assert held.take_all() == [first, second, third]
    clock.now = 6.0
    for one in (first, second):  # no replica could take them
        held.hold(one)
    third.deadline = None  # it was sent in between
    held.hold(third)
    clock.advance(10.0)
    assert overdue == [first] and clock.timers == [10.0, 14.0]
    clock.advance(14.0)
    assert overdue == [first, second] and clock.timers[-1] == 16.0
    held.drop(3)
    clock.advance(16.0)
    assert overdue == [first, second] and len(held) == 0
