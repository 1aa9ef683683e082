"""The choice of a replica for each request, and what becomes of requests whose replica ends or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import pytest
from fake_media import picture
from msgspec.structs import replace
from scripted_engine import NO_WORK, PARAMS, Connect, Replicated, Script, Two, all_of, next_of

from engine_core.client.dispatcher import Dispatcher
from engine_core.client.in_flight import InFlight, Stream
from engine_core.client.replica_routing import BLOCK, ReplicaTable
from engine_core.config import Address, Replicas
from engine_core.protocol import (
    Abort,
    AddRequest,
    AddRequests,
    Failed,
    Leaving,
    Outputs,
    ResetPrefixCache,
    Tokens,
)
from engine_core.reason_codes import DEADLINE
from worker.protocol import Pooling


async def test_requests_go_where_least_is_to_be_done(two: Two) -> None:
    client, first, second, both = two
    long, short = client.submit([1] * 60, PARAMS), client.submit([2] * 20, PARAMS)
    third, fourth = client.submit([3] * 30, PARAMS), client.submit([4], PARAMS)
    assert [add.id for add in await first.received(1) if isinstance(add, AddRequest)] == [long.id]
    assert [add.id for add in await second.received(3) if isinstance(add, AddRequest)] == [
        short.id,
        third.id,
        fourth.id,
    ]
    # Its prompt is computed, so it weighs little from here on.
    first.answer(long, 7)
    await both.until(lambda: client.replicas[0].tokens < 60)
    fifth = client.submit([5], PARAMS)
    assert isinstance(add := (await first.received(1))[0], AddRequest) and add.id == fifth.id
    for stream, script in ((long, first), (short, second), (third, second), (fourth, second)):
        script.answer(stream, 9, finish="length")
    client.abort([fifth.id])
    await both.until(lambda: not client.open_streams)
    assert [(one.tokens, one.requests) for one in client.replicas] == [(0, 0), (0, 0)]
    assert await first.received(1) == [Abort([fifth.id])]


async def test_texts_to_pool_are_spread_in_one_frame_each(two: Two) -> None:
    client, first, second, _ = two
    params = Pooling(task="embed")
    streams = client.submit_many([([n], params) for n in range(10)])
    frames = [(await script.received(1))[0] for script in (first, second)]
    assert [len(frame.adds) for frame in frames if isinstance(frame, AddRequests)] == [5, 5]
    ids = {add.id for frame in frames if isinstance(frame, AddRequests) for add in frame.adds}
    assert ids == {stream.id for stream in streams}


async def test_pictures_are_sent_once_in_a_message_and_again_to_another_engine(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, first, second, both = two
    monkeypatch.setattr("engine_core.client.dispatcher._MEDIA_IN_MESSAGE", 15)
    one, two_ = (picture(hash, 0, 2, pixels=hash * 3) for hash in (b"one", b"two"))
    params = Pooling(task="embed")
    texts = [([1, 2, 3], params, one), ([1, 2, 4], params, one), ([1, 2, 5], params, two_), ([6], params)]
    streams = client.submit_many(texts, replica=0)
    frames = await first.received(2)
    adds = [frame.adds for frame in frames if isinstance(frame, AddRequests)]
    assert [[len(add.media) for add in each] for each in adds] == [[1, 1], [1, 0]]
    assert adds[0][0].media[0].pixels.data is adds[0][1].media[0].pixels.data
    client.abort([stream.id for stream in streams])
    client.submit([0] * 9, PARAMS, replica=0)
    moved = client.submit([1, 2, 3], PARAMS, media=(one,))
    for script in (second, first):
        sent = (await script.received(1 if script is second else 3))[-1]
        assert isinstance(sent, AddRequest) and sent.id == moved.id
        assert bytes(sent.media[0].pixels.data) == b"oneoneone"
        if script is second:
            both.end(second)


async def test_all_choices_of_a_prompt_share_its_pictures(connect: Connect) -> None:
    replicated = connect(1)
    script, one = await replicated.start(0), picture(b"one", 0, 2)
    streams = replicated.client.submit_all([([1, 2, 3], PARAMS)] * 4, media=(one,))
    [message] = await script.received(1)
    assert isinstance(message, AddRequests) and [add.id for add in message.adds] == [
        each.id for each in streams
    ]
    assert len({id(add.media[0].pixels.data) for add in message.adds}) == 1


async def test_a_prompt_that_begins_like_another_follows_it(two: Two) -> None:
    client, first, second, _ = two
    for token, script in ((1, first), (2, second)):
        client.submit([token] * BLOCK * 4, PARAMS)
        await script.received(1)
    for _ in range(3):
        client.submit([2] * BLOCK * 4 + [9], PARAMS)
    assert len(await second.received(3)) == 3
    client.orders.reset_prefix_cache()
    client.submit([2] * BLOCK * 4, PARAMS)  # no replica holds it now, and the first one has less to do
    assert [type(request) for request in await first.received(2)] == [ResetPrefixCache, AddRequest]


async def test_a_request_that_cannot_be_written_fails_and_leaves_nothing(two: Two) -> None:
    client, *_ = two
    failed = await next_of(client.submit([1], PARAMS, priority=1 << 70))
    assert isinstance(failed, Failed) and failed.code == 400 and "cannot be sent" in failed.message
    assert not client.open_streams and not any(one.requests for one in client.replicas)


async def test_a_replica_can_be_named(two: Two) -> None:
    client, _, second, _ = two
    for _ in range(3):
        client.submit([1], PARAMS, replica=1)
    assert len(await second.received(3)) == 3
    client.engine_exited(1, -9)
    (refused,) = [output async for output in client.submit([1], PARAMS, replica=1)]
    assert refused == Failed(refused.id, 503, "replica 1 takes no requests now")


async def test_what_a_dead_replica_had_goes_to_another(two: Two) -> None:
    client, first, second, both = two
    client.submit([2] * 200, PARAMS, replica=1)
    named, begun = client.submit([1], PARAMS, replica=0), client.submit([1], PARAMS)
    moved, (vector,) = client.submit([3], PARAMS), client.submit_many([([4], Pooling(task="embed"))])
    assert (len(await first.received(4)), len(await second.received(1))) == (4, 1)
    first.answer(named, 8)
    first.answer(begun, 8)
    first.answer(begun, 9)
    both.end(first)
    assert await all_of(named) == [
        Tokens(id=named.id, tokens=[8]),
        Failed(
            named.id, 503, "the replica that was generating this answer has ended: send the request again"
        ),
    ]
    goes_on = AddRequest(begun.id, [1, 8, 9], PARAMS, prompt_len=1)
    assert await second.received(1) == [
        AddRequests(
            [goes_on, AddRequest(moved.id, [3], PARAMS), AddRequest(vector.id, [4], Pooling(task="embed"))]
        )
    ], "those that had begun come first"
    second.answer(begun, 5, finish="length")
    second.answer(moved, 5, finish="length")  # it is read first: all has come then
    assert await all_of(moved) == [Tokens(id=moved.id, tokens=[5], finish="length")]
    assert await all_of(begun) == [Tokens(id=begun.id, tokens=[8, 9, 5], finish="length")]
    assert client.dead is None and client.ready is not None


async def test_a_dead_replica_that_speaks_after_all_is_not_believed(two: Two) -> None:
    client, first, second, _ = two
    client.submit([2] * 200, PARAMS, replica=1)
    stream = client.submit([1], PARAMS)
    await first.received(1)
    client.engine_exited(0, -9)
    first.answer(stream, 6, finish="stop")
    await second.received(2)
    second.answer(stream, 5, finish="length")
    assert await all_of(stream) == [Tokens(id=stream.id, tokens=[5], finish="length")]


async def test_what_a_replica_could_not_finish_in_its_last_seconds_goes_on(two: Two) -> None:
    client, first, second, _ = two
    client.submit([2] * 200, PARAMS, replica=1)
    waiting, begun = client.submit([1], PARAMS), client.submit([1], PARAMS)
    (vector,) = client.submit_many([([4], Pooling(task="embed"))])
    await first.received(3)
    first.answer(begun, 3)
    ended = [Tokens(id=stream.id, tokens=[], finish="abort") for stream in (waiting, begun)]
    first.send(Leaving(), Outputs([*ended, Failed(vector.id, 503, "the request was ended")]))
    moved = await second.received(4)
    assert moved[1:] == [
        AddRequest(waiting.id, [1], PARAMS),
        AddRequest(begun.id, [1, 3], PARAMS, prompt_len=1),
        AddRequests([AddRequest(vector.id, [4], Pooling(task="embed"))]),
    ]


async def test_a_replica_that_leaves_gets_nothing_new_and_what_it_refuses_goes_on(two: Two) -> None:
    client, first, second, both = two
    client.submit([2] * 200, PARAMS, replica=1)
    early, late = client.submit([1], PARAMS), client.submit([1], PARAMS)
    await first.received(2)
    first.answer(early, 3)
    first.send(Leaving(), Outputs([Failed(late.id, 503, "the engine is shutting down")]))
    await both.until(lambda: client.replicas[0].leaving)
    client.submit([1], PARAMS)
    assert len(await second.received(3)) == 3
    first.answer(early, 4, finish="length")
    last = (await all_of(early))[-1]
    assert isinstance(last, Tokens) and last.finish == "length"


async def test_other_servers_requests_count_as_far_as_engines_tell(connect: Connect) -> None:
    both = connect(2, servers=2)
    first, second = await both.start(0), await both.start(1)
    first.send(replace(NO_WORK, running=9))
    await both.until(lambda: both.client.replicas[0].stats is not None)
    for _ in range(3):
        both.client.submit([1] * 10, PARAMS)
    assert len(await second.received(3)) == 3


async def alone(connect: Connect, restart_wait: float = 60) -> tuple[Replicated, Script]:
    found = connect(restart_wait=restart_wait)
    return found, await found.start(0)


async def two_of(connect: Connect, restart_wait: float = 60) -> tuple[Replicated, Script, Script]:
    both = connect(2, restart_wait=restart_wait)
    return both, await both.start(0), await both.start(1)


async def ids_received(script: Script, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            for request in await script.received(1):
                if isinstance(request, AddRequests):
                    found += [add.id for add in request.adds]
                elif isinstance(request, AddRequest):
                    found.append(request.id)
    return found


async def only(stream: Stream) -> Tokens | Failed:
    [output] = await all_of(stream)
    return output


async def test_requests_wait_for_the_engine_that_is_started_again(connect: Connect) -> None:
    found, first = await alone(connect)
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


async def test_a_held_request_can_be_aborted(connect: Connect) -> None:
    found, first = await alone(connect)
    found.client.engine_exited(0, -9)
    found.end(first)
    left, stays = found.client.submit([1], PARAMS), found.client.submit([2], PARAMS)
    found.client.abort([left.id])
    assert await only(left) == Tokens(id=left.id, tokens=[], finish="abort")
    assert await ids_received(await found.start(0), 1) == [stays.id]


async def test_what_waits_too_long_is_refused(connect: Connect) -> None:
    found, _ = await alone(connect, restart_wait=0.05)
    found.client.engine_exited(0, -9)
    stream = found.client.submit([1], PARAMS)
    assert await only(stream) == Failed(stream.id, 503, "no engine can take requests now")


async def test_by_default_requests_wait_three_times_as_long_as_the_last_start_took(connect: Connect) -> None:
    found = connect(restarts=True)
    first = await found.start(0, start_seconds=20.0)
    begun = found.client.submit([1], PARAMS)
    await first.received(1)
    found.client.engine_exited(0, -9)
    [(_, timer)] = waiting(found)
    assert 55 < timer.when() - asyncio.get_running_loop().time() <= 60
    found.client.abort([begun.id])
    await found.start(0, start_seconds=0.5)
    found.client.engine_exited(0, -9)
    found.client.submit([2], PARAMS)
    [(_, timer)] = waiting(found)
    assert 5 < timer.when() - asyncio.get_running_loop().time() <= 10


def waiting(found: Replicated) -> list[tuple[int, asyncio.TimerHandle]]:
    """The requests that no engine can take now, and when they are refused."""
    dispatcher = found.client._dispatcher  # pyright: ignore[reportPrivateUsage]
    return list(dispatcher._held.items())  # pyright: ignore[reportPrivateUsage]


async def test_what_may_take_a_short_time_waits_no_longer(connect: Connect) -> None:
    found, first = await alone(connect)
    begun = found.client.submit([1], PARAMS, budget=0.3)
    await first.received(1)
    first.answer(begun, 9)
    assert await next_of(begun) == Tokens(id=begun.id, tokens=[9])
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


async def test_nothing_is_held_for_an_engine_that_is_given_up(connect: Connect) -> None:
    found, _ = await alone(connect)
    found.client.engine_exited(0, -9)
    stream = found.client.submit([1], PARAMS)
    found.client.engine_given_up(0, "it broke 5 times", explained=False)
    assert await only(stream) == Failed(stream.id, 503, "it broke 5 times", "engine_given_up")


async def test_a_request_for_one_replica_waits_for_it_alone(connect: Address) -> None:
    both, first, _ = await two_of(connect)
    both.client.engine_exited(0, -9)
    both.end(first)
    stream = both.client.submit([1], PARAMS, replica=0)
    assert await ids_received(await both.start(0), 1) == [stream.id]
    both.client.engine_exited(0, -9)
    later = both.client.submit([1], PARAMS, replica=0)
    both.client.engine_given_up(0, "it broke 5 times", explained=False)
    for each in (stream, later):
        assert await only(each) == Failed(each.id, 503, "replica 0 takes no requests now")


async def test_a_replica_that_nobody_may_have_is_not_waited_for(connect: Connect) -> None:
    found, _ = await alone(connect)
    stream = found.client.submit([1], PARAMS, replica=7)
    assert await only(stream) == Failed(stream.id, 503, "replica 7 takes no requests now")


class Clock:
    """A loop of which only the clock and the timers are used."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., None], *given: object) -> Timer:
        self.timers.append(Timer(self, when, lambda: callback(*given)))
        return self.timers[-1]

    def advance(self, to: float) -> None:
        self.now = to
        for timer in [timer for timer in self.timers if timer.when <= to]:
            timer.cancel()
            timer.ring()


@dataclass(eq=False)
class Timer:
    clock: Clock
    when: float
    ring: Callable[[], None]

    def cancel(self) -> None:
        if self in self.clock.timers:
            self.clock.timers.remove(self)


def test_each_waits_for_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    dispatcher = Dispatcher(ReplicaTable(Replicas(), servers=1), lambda number, request: None, 10.0)
    first, second, third = (
        InFlight(AddRequest(id, [1], PARAMS), Stream(id, cast("asyncio.AbstractEventLoop", clock)))
        for id in (1, 2, 3)
    )
    dispatcher.dispatch([first])
    clock.now = 4.0
    dispatcher.dispatch([second, third])
    clock.now = 6.0
    third.deadline = None  # it was sent in between
    dispatcher.dispatch_held()
    assert [timer.when for timer in clock.timers] == [10.0, 14.0, 16.0], "no replica could take them"
    for now, left in ((9.9, 3), (10.0, 2), (13.9, 2), (14.0, 1)):
        clock.advance(now)
        assert len(dispatcher) == left
    dispatcher.abort([3])
    assert len(dispatcher) == 0 and not clock.timers
