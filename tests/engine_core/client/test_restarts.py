"""Engines that end and are started again, as the client sees it, and engines that are given up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from scripted_engine import PARAMS, Connect, Replicated, Two, all_of

from engine_core.protocol import AddRequest, Dead, Failed, Leaving, Tokens
from worker.child import BROKE, CANNOT_START


@pytest_asyncio.fixture
async def one(connect: Connect) -> AsyncIterator[Replicated]:
    """A client whose only engine is started again when it ends."""
    found = connect(restart_wait=0.0)
    await found.start(0)
    yield found


async def test_an_only_engine_that_ends_leaves_a_client_that_lives(one: Replicated) -> None:
    client = one.client
    assert client.restarting is None
    one.end(one.scripts[0])
    await one.until(lambda: client.restarting == "engine_lost")
    assert client.ready is None and client.dead is None and not client.died.is_set()
    client.engine_exited(0, -9)
    assert client.restarting == "engine_killed"
    await one.start(0)
    assert client.restarting is None and client.ready is not None


async def test_an_exit_is_known_before_the_connection_shows_it(one: Replicated) -> None:
    client = one.client
    client.engine_exited(0, BROKE)
    assert client.restarting == "engine_broke" and client.ready is None
    one.end(one.scripts[0])
    again = await one.start(0)
    stream = client.submit([1], PARAMS)
    assert len(await again.received(1)) == 1
    assert client.open_streams == 1 and stream.id


async def test_an_engine_that_is_given_up_ends_the_client_with_the_reason(one: Replicated) -> None:
    client = one.client
    client.engine_exited(0, -9)
    client.engine_given_up(0, "it broke 5 times", explained=False)
    assert client.died.is_set() and client.dead == "it broke 5 times"
    assert not client.explained and client.restarting is None
    stream = client.submit([1], PARAMS)
    assert await all_of(stream) == [Failed(stream.id, 503, "it broke 5 times", "engine_given_up")]


async def test_the_engine_s_own_words_count_more(one: Replicated) -> None:
    one.scripts[0].send(Dead("tensor 'a' is missing"))
    await one.until(lambda: one.client.restarting is not None)
    one.client.engine_exited(0, CANNOT_START)
    one.client.engine_given_up(0, "it exited with code 2", explained=True)
    assert one.client.dead == "tensor 'a' is missing" and one.client.explained


async def test_nobody_starts_engines_again_unless_it_is_said(connect: Connect) -> None:
    alone = connect()
    alone.end(await alone.start(0))
    await alone.until(alone.client.died.is_set)
    assert alone.client.dead == "the engine process ended while serving"


async def test_a_replica_of_another_machine_may_come_back(connect: Connect) -> None:
    both = connect(2, here=1, restart_wait=0.0)
    await both.start(0)
    far = await both.start(1)  # as if from another machine
    both.end(far)
    await both.until(lambda: both.state(1) != "works")
    both.client.engine_given_up(0, "it broke 5 times", explained=False)
    assert both.client.dead is None and both.client.restarting == "engine_lost"
    await both.start(1)
    assert both.client.ready is not None


async def test_a_replica_that_makes_no_progress_gets_nothing_new(two: Two) -> None:
    client, first, second, _ = two
    client.engine_stalled(0, True)
    assert client.restarting is None, "the other one works"
    streams = [client.submit([number], PARAMS) for number in range(4)]
    assert len(await second.received(4)) == 4
    client.engine_stalled(0, False)
    streams.append(client.submit([9], PARAMS))
    assert len(await first.received(1)) == 1 and len(streams) == 5


async def test_requests_wait_while_no_engine_makes_progress(connect: Connect) -> None:
    one = connect(restart_wait=30.0)
    script = await one.start(0)
    one.client.engine_stalled(0, True)
    assert one.client.restarting == "engine_stalled" and one.client.ready is not None
    stream = one.client.submit([1], PARAMS)
    one.client.engine_stalled(0, False)
    assert len(await script.received(1)) == 1 and stream.id
    assert one.client.restarting is None
    one.client.engine_stalled(0, True)
    one.end(script)
    await one.until(lambda: one.client.restarting == "engine_lost")
    await one.start(0)
    assert one.client.restarting is None, "the one in its place is another one"


async def test_replicas_that_share_experts_end_with_the_first_and_it_alone_has_suspects(
    connect: Connect,
) -> None:
    group = connect(2, together=True, restart_wait=30.0)
    first, second = await group.start(0), await group.start(1)
    guilty, innocent = (group.client.submit([number], PARAMS, replica=number) for number in (0, 1))
    assert len(await first.received(1)) == len(await second.received(1)) == 1
    for _ in range(2):  # the second time it is a suspect that has run before
        group.end(first)
        await group.until(lambda: group.state(1).startswith("engine 0 has ended, and shares experts"))
        assert group.client.ready is None
        second.send(Dead("engine 0, which shares experts with this one, has ended", with_another=True))
        group.end(second)
        first, second = await group.start(0), await group.start(1)
        [again], [other] = await first.received(1), await second.received(1)
    assert isinstance(again, AddRequest) and isinstance(other, AddRequest)
    assert (again.id, other.id) == (guilty.id, innocent.id)
    assert again.alone and not other.alone


async def test_a_replica_that_says_that_it_ends_with_another_leaves_no_suspects(connect: Connect) -> None:
    group = connect(2, together=True, restart_wait=30.0)
    first, second = await group.start(0), await group.start(1)
    streams = [group.client.submit([1], PARAMS, replica=1)]
    assert len(await second.received(1)) == 1
    second.send(Dead("engine 0, which shares experts with this one, has ended", with_another=True))
    await group.until(lambda: group.state(1) != "works")
    streams.append(group.client.submit([2], PARAMS, replica=0))  # it waits: the other one ends too
    group.end(first)
    group.end(second)
    first, second = await group.start(0), await group.start(1)
    for script, stream in ((second, streams[0]), (first, streams[1])):
        [kept] = await script.received(1)
        assert isinstance(kept, AddRequest) and not kept.alone and kept.id == stream.id


async def test_replicas_that_share_experts_drain_one_by_one(connect: Connect) -> None:
    group = connect(2, together=True, restart_wait=30.0)
    first, second = await group.start(0), await group.start(1)
    stream = group.client.submit([1], PARAMS, replica=1)
    await second.received(1)
    for script in (first, second):
        script.send(Leaving())
    first.send(Dead("the engine has been stopped"))
    await group.until(lambda: group.state(0) == "the engine has been stopped")
    second.answer(stream, 7, finish="length")
    assert await all_of(stream) == [Tokens(stream.id, [7], finish="length")]
