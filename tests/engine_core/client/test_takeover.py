"""Requests with which engines end: who is suspected, who runs alone, who is to blame, and who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from model_facts import changed
from msgspec.structs import replace
from scripted_engine import PARAMS, READY, Replicated, Script

from engine_core.client import dispatcher
from engine_core.client.in_flight import Stream
from engine_core.config import Address, Replicas
from engine_core.protocol import (
    ALONE_TOKENS,
    QUARANTINED,
    AddRequest,
    AddRequests,
    Failed,
    Leaving,
    Outputs,
    RunsAlone,
    Tokens,
)
from worker.protocol import Pooling, Sampling

LONG = Sampling(max_tokens=50)


class One(Replicated):
    """A client with one engine, which ends and is started again as the test likes."""

    @property
    def script(self) -> Script:
        return self.scripts[0]

    async def adds(self, count: int) -> list[AddRequest]:
        """The requests that the engine gets, in the order in which they come."""
        found: list[AddRequest] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                for request in await self.script.received(1):
                    found += request.adds if isinstance(request, AddRequests) else []
                    found += [request] if isinstance(request, AddRequest) else []
        return found

    async def restart(self, count: int, **facts: object) -> list[AddRequest]:
        """Kill the engine and start another one; returns the requests that it gets."""
        self.client.engine_exited(0, -9)
        self.end(self.script)
        await self.start(0, **facts)
        return await self.adds(count) if count else []

    async def say(self, stream: Stream, *tokens: int) -> None:
        """Let the engine give tokens, and wait until they have come."""
        for token in tokens:
            self.script.answer(stream, token)
        async with asyncio.timeout(60):
            while (read := await anext(stream)).tokens[-1] != tokens[-1]:
                assert isinstance(read, Tokens)

    async def runs_alone(self, stream: Stream) -> None:
        self.script.send(Outputs([RunsAlone(stream.id)]))
        one = self.client._dispatcher._in_flight[stream.id]  # pyright: ignore[reportPrivateUsage]
        await self.until(lambda: one.runs_alone)


@pytest_asyncio.fixture
async def one(address: Address) -> AsyncIterator[One]:
    found = One(address, Replicas(), restart_wait=60)
    await found.start(0)
    yield found
    found.close()


async def last(stream: Stream) -> object:
    async with asyncio.timeout(60):
        return [output async for output in stream][-1]


async def test_one_that_ends_three_engines_is_to_blame_and_no_other(one: One) -> None:
    good, bad = one.client.submit([1], LONG), one.client.submit([2], PARAMS)
    await one.adds(2)
    await one.say(good, 5)
    assert [(add.id, add.alone) for add in await one.restart(2)] == [(good.id, False), (bad.id, False)]
    adds = await one.restart(2)
    assert [(add.id, add.alone) for add in adds] == [(bad.id, True), (good.id, True)], "the likeliest first"
    await one.runs_alone(bad)
    adds = await one.restart(1)
    assert await last(bad) == Failed(bad.id, 500, adds_message(), QUARANTINED)
    assert [(add.id, add.tokens) for add in adds] == [(good.id, [1, 5])]
    await one.say(good, *range(ALONE_TOKENS))
    assert [add.alone for add in await one.restart(1)] == [False], "it got on, and is not a suspect"


async def test_one_that_ends_engines_for_want_of_memory_may_be_sent_again(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = one.client.submit([2], PARAMS)
    await one.adds(1)
    for _ in range(2):
        await one.restart(1)
    await one.runs_alone(bad)
    monkeypatch.setattr(dispatcher, "kills_for_memory", lambda: 1_000_000)
    await one.restart(0)
    assert await last(bad) == Failed(bad.id, 503, "there is too little memory for this request now")
    again = one.client.submit([2], PARAMS)
    assert [(add.id, add.alone) for add in await one.adds(1)] == [(again.id, False)]


def adds_message() -> str:
    return "the engine fails whenever it computes this request: change it, or report the failure"


async def test_one_that_gets_on_between_the_ends_is_never_alone(one: One) -> None:
    stream = one.client.submit([1], LONG)
    await one.adds(1)
    for _ in range(5):
        await one.say(stream, *range(ALONE_TOKENS))
        assert [add.alone for add in await one.restart(1)] == [False]


async def test_one_that_got_through_alone_is_not_to_blame(one: One) -> None:
    stream = one.client.submit([1], LONG)
    await one.adds(1)
    await one.restart(1)
    assert [add.alone for add in await one.restart(1)] == [True]
    await one.runs_alone(stream)
    await one.say(stream, *range(ALONE_TOKENS))
    assert [add.alone for add in await one.restart(1)] == [False]


async def test_without_word_that_one_ran_alone_nobody_is_to_blame(one: One) -> None:
    first, second = one.client.submit([1], LONG), one.client.submit([2], LONG)
    await one.adds(2)
    for _ in range(4):
        ids = {add.id for add in await one.restart(2)}
    assert ids == {first.id, second.id}


async def test_those_that_wait_for_a_slot_are_no_suspects(one: One) -> None:
    streams = [one.client.submit([n], LONG) for n in range(6)]
    streams += one.client.submit_many([([n], Pooling(task="embed")) for n in range(6)])
    await one.adds(12)
    for _ in range(2):
        adds = await one.restart(12)
    slots = READY.worker.max_num_seqs
    expected = {stream.id for stream in (*streams[:slots], *streams[6 : 6 + slots])}
    assert {add.id for add in adds if add.alone} == expected


async def test_under_priorities_the_next_ones_are_suspects(one: One) -> None:
    facts = {"max_num_seqs": 1}
    await one.restart(0, **facts)
    one.script.send(replace(changed(READY, **facts), scheduling_policy="priority"))
    await one.until(lambda: one.client.ready is not None and one.client.ready.scheduling_policy == "priority")
    later, first = one.client.submit([1], LONG, priority=1), one.client.submit([2], LONG, priority=-1)
    await one.adds(2)
    one.client.engine_exited(0, -9)
    strikes = {request.id: request.strikes for request in one.client._dispatcher._in_flight.values()}  # pyright: ignore
    assert strikes == {later.id: 0, first.id: 1}


async def test_an_engine_that_was_asked_to_end_counts_against_nobody(one: One) -> None:
    stream = one.client.submit([1], LONG)
    await one.adds(1)
    for _ in range(3):
        one.script.send(Leaving())
        await one.until(lambda: one.client.replicas[0].leaving)
        [add] = await one.restart(1)
        assert (add.id, add.alone) == (stream.id, False)


async def test_what_is_to_blame_is_refused_whoever_sends_it(one: One) -> None:
    stream = one.client.submit([1, 2], Sampling(max_tokens=5, seed=7))
    await one.adds(1)
    one.script.send(Outputs([Failed(stream.id, 500, adds_message(), QUARANTINED)]))
    assert isinstance(await last(stream), Failed)
    again = one.client.submit([1, 2], Sampling(max_tokens=5, seed=8))
    assert await last(again) == Failed(again.id, 500, adds_message(), QUARANTINED)
    other = one.client.submit([1, 2], Sampling(max_tokens=6, seed=7))
    assert [add.id for add in await one.adds(1)] == [other.id]
