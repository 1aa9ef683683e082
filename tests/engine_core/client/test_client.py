"""The client against engines that are scripted by the test, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq
from model_facts import READY as SMALL
from model_facts import changed
from ports import free_ports

from engine_core.client.client import EngineClient
from engine_core.client.join import Refused, join
from engine_core.client.routing import BLOCK
from engine_core.client.streams import Stream
from engine_core.config import Address, Replicas
from engine_core.protocol import (
    Abort,
    Add,
    AddMany,
    Answer,
    Dead,
    Drain,
    Failed,
    Leaving,
    Outputs,
    Pooled,
    Progress,
    Ready,
    Request,
    ResetPrefixCache,
    Stats,
    Tokens,
)
from engine_core.wire import transport
from engine_core.wire.transport import EngineEnd
from worker.protocol import Pooling, Sampling, TokenLogprobs, Vectors

PARAMS = Sampling(max_tokens=5)
READY = changed(SMALL, num_blocks=1000, vocab_size=50)


class Script:
    """An engine that sends what the test tells it to."""

    def __init__(self, address: Address, number: int = 0) -> None:
        self.number = number
        self._context = zmq.Context()
        self._end = EngineEnd(self._context, address, engine=number)

    def say(self, *answers: Answer) -> None:
        for answer in answers:
            self._end.send(answer)

    def answer(self, stream: Stream[Any], *tokens: int, **more: Any) -> None:
        self.say(Outputs([Tokens(id=stream.id, tokens=list(tokens), **more)]))

    async def heard(self, count: int) -> list[Request]:
        requests: list[Request] = []
        async with asyncio.timeout(5):
            while len(requests) < count:
                requests += self._end.requests.read()
                await asyncio.sleep(0.001)
        return requests

    def close(self) -> None:
        self._end.close()
        self._context.term()


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address(requests=f"ipc://{tmp_path}/requests", answers=f"ipc://{tmp_path}/answers")


@pytest_asyncio.fixture
async def pair(address: Address) -> AsyncIterator[tuple[EngineClient, Script]]:
    client, script = EngineClient(address), Script(address)
    script.say(READY)
    yield client, script
    client.close()
    script.close()


async def submit(client: EngineClient, script: Script, count: int = 1) -> list:
    """Submit requests; returns their streams once they have arrived at the engine."""
    streams = []
    async with asyncio.timeout(5):
        while len(streams) < count:
            stream = client.submit([1], PARAMS)
            if client.open_streams > len(streams):
                streams.append(stream)
            await asyncio.sleep(0.001)
    assert [add.id for add in await script.heard(count) if isinstance(add, Add)] == [s.id for s in streams]
    return streams


async def test_ids_are_unique_and_not_guessed_by_a_successor(pair: tuple[EngineClient, Script]) -> None:
    first, second = await submit(*pair, count=2)
    assert first.id != second.id
    assert first.id > 1000


async def test_what_came_together_is_read_as_one(pair: tuple[EngineClient, Script]) -> None:
    client, script = pair
    (stream,) = await submit(client, script)
    entry = TokenLogprobs(ids=[1], values=[-1.0], rank=1)
    script.say(
        Outputs([Tokens(id=stream.id, tokens=[1], logprobs=[entry], prompt_logprobs=[entry], cached=16)]),
        Outputs([Tokens(id=stream.id, tokens=[2], logprobs=[entry])]),
        Outputs([Tokens(id=stream.id, tokens=[3], logprobs=[entry], finish="stop")]),
    )
    async with asyncio.timeout(5):
        while client.open_streams:
            await asyncio.sleep(0.001)
        assert await anext(stream) == Tokens(
            id=stream.id,
            tokens=[1, 2, 3],
            logprobs=[entry] * 3,
            prompt_logprobs=[entry],
            cached=16,
            finish="stop",
        )


async def test_tokens_before_a_failure_are_not_lost(pair: tuple[EngineClient, Script]) -> None:
    client, script = pair
    (stream,) = await submit(client, script)
    failed = Failed(id=stream.id, code=500, message="broke")
    script.say(Outputs([Tokens(id=stream.id, tokens=[1])]), Outputs([failed]))
    async with asyncio.timeout(5):
        assert [output async for output in stream] == [Tokens(id=stream.id, tokens=[1]), failed]


async def test_death_ends_each_open_stream_once(pair: tuple[EngineClient, Script]) -> None:
    client, script = pair
    ended, *streams = await submit(client, script, count=3)
    script.say(Outputs([Tokens(id=ended.id, tokens=[1], finish="length")]), Dead("out of order"))
    async with asyncio.timeout(5):
        await client.died.wait()
        client.fail("something later")
        assert [output.finish async for output in ended] == ["length"]
        for stream in streams:
            assert [output async for output in stream] == [Failed(stream.id, 503, "out of order")]
    assert client.dead == "out of order"


async def test_an_engine_of_another_version_is_refused(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient(address)
    monkeypatch.setattr(transport, "PROTOCOL", "another")
    script = Script(address)
    async with asyncio.timeout(5):
        await client.died.wait()
    assert client.dead is not None and "another version" in client.dead
    client.close()
    script.close()


async def test_many_requests_travel_in_few_frames(
    pair: tuple[EngineClient, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, script = pair
    await submit(client, script)  # requests can be sent to the engine
    monkeypatch.setattr("engine_core.client.dispatcher._TOKENS_IN_FRAME", 10)
    params = Pooling(task="embed")
    prompts = [[1] * 4, [2] * 6, [3] * 30, [4]]
    streams = client.submit_many([(prompt, params) for prompt in prompts], priority=2, salt="s")
    frames = await script.heard(3)
    adds = [add for frame in frames if isinstance(frame, AddMany) for add in frame.adds]
    assert [len(frame.adds) for frame in frames if isinstance(frame, AddMany)] == [2, 1, 1]
    assert adds == [
        Add(id=stream.id, tokens=prompt, params=params, priority=2, salt="s")
        for stream, prompt in zip(streams, prompts, strict=True)
    ]
    first, second, third, fourth = streams
    vectors = Vectors(b"\0\0\0\0", (1,))
    script.say(Outputs([Pooled(first.id, vectors, cached=1), Failed(second.id, 500, "broke")]))
    async with asyncio.timeout(5):
        assert [output async for output in first] == [Pooled(first.id, vectors, cached=1)]
        assert await anext(second) == Failed(second.id, 500, "broke")
        client.abort([third.id])
        assert (await anext(third)).code == 503  # pyright: ignore[reportAttributeAccessIssue]
        client.fail("gone")
        assert await anext(fourth) == Failed(fourth.id, 503, "gone")
    (late,) = client.submit_many([([1], params)])
    assert await anext(late) == Failed(late.id, 503, "gone")
    assert client.submit_many([]) == []


async def test_a_frame_that_is_too_large_fails_its_own_requests(
    pair: tuple[EngineClient, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, script = pair
    await submit(client, script)
    monkeypatch.setattr("engine_core.wire.transport.MAX_REQUEST_BYTES", 1000)
    monkeypatch.setattr("engine_core.client.dispatcher._TOKENS_IN_FRAME", 10)
    params = Pooling(task="embed")
    large, small = client.submit_many([([1] * 2000, params), ([1], params)])
    async with asyncio.timeout(5):
        refused = await anext(large)
        assert isinstance(refused, Failed) and refused.code == 400
        (frame,) = await script.heard(1)
        assert isinstance(frame, AddMany) and frame.adds[0].id == small.id


# Several replicas.


class Replicated:
    """A client, and a scripted engine for each of its replicas."""

    def __init__(self, address: Address, layout: Replicas, **options: Any) -> None:
        self.address = address
        self.client = EngineClient(address, layout, **options)
        self.scripts: list[Script] = []

    async def start(self, number: int, at: Address | None = None, **facts: Any) -> Script:
        """Start a replica, and wait until the client knows that it is ready."""
        script = Script(at or self.address, number)
        self.scripts.append(script)
        script.say(changed(READY, **facts))
        await self.until(lambda: self.state(number) == "works")
        return script

    def state(self, number: int) -> str:
        found = [one for one in self.client.replicas if one.number == number]
        if not found:
            return "unknown"
        return found[0].lost or ("works" if found[0].works else "begins")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)

    def end(self, script: Script) -> None:
        """End the process of a replica, as the client sees it."""
        self.scripts.remove(script)
        script.close()

    def close(self) -> None:
        self.client.close()
        for script in self.scripts:
            script.close()


@pytest_asyncio.fixture
async def two(address: Address) -> AsyncIterator[tuple[EngineClient, Script, Script, Replicated]]:
    both = Replicated(address, Replicas(size=2, here=2))
    yield both.client, await both.start(0), await both.start(1), both
    both.close()


Two = tuple[EngineClient, Script, Script, Replicated]


async def test_requests_go_where_least_is_to_be_done(two: Two) -> None:
    client, first, second, both = two
    long, short = client.submit([1] * 60, PARAMS), client.submit([2] * 20, PARAMS)
    third, fourth = client.submit([3] * 30, PARAMS), client.submit([4], PARAMS)
    assert [add.id for add in await first.heard(1) if isinstance(add, Add)] == [long.id]
    assert [add.id for add in await second.heard(3) if isinstance(add, Add)] == [
        short.id,
        third.id,
        fourth.id,
    ]
    # Its prompt is computed, so it weighs little from here on.
    first.answer(long, 7)
    await both.until(lambda: client.replicas[0].tokens < 60)
    fifth = client.submit([5], PARAMS)
    assert isinstance(add := (await first.heard(1))[0], Add) and add.id == fifth.id
    for stream, script in ((long, first), (short, second), (third, second), (fourth, second)):
        script.answer(stream, 9, finish="length")
    client.abort([fifth.id])
    await both.until(lambda: not client.open_streams)
    assert [(one.tokens, one.requests) for one in client.replicas] == [(0, 0), (0, 0)]
    assert await first.heard(1) == [Abort([fifth.id])]


async def test_texts_to_pool_are_spread_in_one_frame_each(two: Two) -> None:
    client, first, second, _ = two
    params = Pooling(task="embed")
    streams = client.submit_many([([n], params) for n in range(10)])
    frames = [(await script.heard(1))[0] for script in (first, second)]
    assert [len(frame.adds) for frame in frames if isinstance(frame, AddMany)] == [5, 5]
    ids = {add.id for frame in frames if isinstance(frame, AddMany) for add in frame.adds}
    assert ids == {stream.id for stream in streams}


async def test_a_prompt_that_begins_like_another_follows_it(two: Two) -> None:
    client, first, second, _ = two
    for token, script in ((1, first), (2, second)):
        client.submit([token] * BLOCK * 4, PARAMS)
        await script.heard(1)
    for _ in range(3):
        client.submit([2] * BLOCK * 4 + [9], PARAMS)
    assert len(await second.heard(3)) == 3
    client.reset_prefix_cache()
    client.submit([2] * BLOCK * 4, PARAMS)  # no replica holds it now, and the first one has less to do
    assert [type(request) for request in await first.heard(2)] == [ResetPrefixCache, Add]


async def test_documents_go_to_where_their_query_is(two: Two) -> None:
    client, first, *_ = two
    client.submit_many([([1], Pooling(task="token_embed", late_query="q"))])
    await first.heard(1)
    documents = [([2] * 50, Pooling(task="token_embed", late_document="q"))] * 4
    client.submit_many(documents)
    (frame,) = await first.heard(1)
    assert isinstance(frame, AddMany) and len(frame.adds) == 4


async def test_a_replica_can_be_named(two: Two) -> None:
    client, _, second, _ = two
    for _ in range(3):
        client.submit([1], PARAMS, replica=1)
    assert len(await second.heard(3)) == 3
    client.engine_exited(1, -9)
    (refused,) = [output async for output in client.submit([1], PARAMS, replica=1)]
    assert refused == Failed(refused.id, 503, "replica 1 takes no requests now")


async def test_what_a_dead_replica_had_not_begun_goes_to_another(two: Two) -> None:
    client, first, second, both = two
    begun = client.submit([1], PARAMS, replica=0)
    client.submit([2] * 200, PARAMS, replica=1)
    moved, (vector,) = client.submit([3], PARAMS), client.submit_many([([4], Pooling(task="embed"))])
    assert (len(await first.heard(3)), len(await second.heard(1))) == (3, 1)
    first.answer(begun, 8)
    both.end(first)
    async with asyncio.timeout(5):
        assert [output async for output in begun] == [
            Tokens(id=begun.id, tokens=[8]),
            Failed(
                begun.id, 503, "the replica that was generating this answer has ended: send the request again"
            ),
        ]
    assert await second.heard(1) == [
        AddMany([Add(moved.id, [3], PARAMS), Add(vector.id, [4], Pooling(task="embed"))])
    ]
    second.answer(moved, 5, finish="length")
    async with asyncio.timeout(5):
        assert [output async for output in moved] == [Tokens(id=moved.id, tokens=[5], finish="length")]
    assert client.dead is None and client.ready is not None


async def test_a_dead_replica_that_speaks_after_all_is_not_believed(two: Two) -> None:
    client, first, second, _ = two
    client.submit([2] * 200, PARAMS, replica=1)
    stream = client.submit([1], PARAMS)
    await first.heard(1)
    client.engine_exited(0, -9)
    first.answer(stream, 6, finish="stop")
    await second.heard(2)
    second.answer(stream, 5, finish="length")
    async with asyncio.timeout(5):
        assert [output async for output in stream] == [Tokens(id=stream.id, tokens=[5], finish="length")]


async def test_the_end_of_the_last_replica_is_the_end(two: Two) -> None:
    client, first, second, both = two
    stream = client.submit([1], PARAMS, replica=1)
    first.say(Dead("out of order"))
    await both.until(lambda: both.state(0) == "out of order")
    assert not client.died.is_set()
    second.say(Dead("this one too"))
    async with asyncio.timeout(5):
        await client.died.wait()
        assert [output async for output in stream] == [Failed(stream.id, 503, "this one too")]
    assert client.dead == "this one too"


async def test_a_replica_in_the_place_of_a_dead_one_is_used(two: Two) -> None:
    client, first, _, both = two
    both.end(first)
    await both.until(lambda: both.state(0) == "the engine process ended while serving")
    again = await both.start(0)
    client.submit([1], PARAMS, replica=0)
    assert len(await again.heard(1)) == 1


async def test_a_replica_that_is_back_before_its_end_is_noticed_has_lost_its_requests(two: Two) -> None:
    client, first, second, both = two
    client.submit([2] * 200, PARAMS, replica=1)
    stream = client.submit([1], PARAMS)
    await first.heard(1)
    await both.start(0)  # on a connection of its own, while the first one seems to be there
    requests = await second.heard(2)
    assert isinstance(requests[1], Add) and requests[1].id == stream.id
    both.end(first)
    await asyncio.sleep(0.05)  # in which its end would be noticed
    assert both.state(0) == "works"


async def test_of_two_with_one_number_only_the_later_is_heard(two: Two) -> None:
    client, first, _, both = two
    later = await both.start(0, max_num_seqs=3)
    await both.until(lambda: client.ready is not None and client.ready.worker.max_num_seqs == 7)
    stream = client.submit([1], PARAMS, replica=0)
    first.answer(stream, 6, finish="stop")
    first.say(Dead("by mistake"))
    await asyncio.sleep(0.05)  # in which its message would arrive
    later.answer(stream, 5, finish="length")
    async with asyncio.timeout(5):
        assert [output async for output in stream] == [Tokens(id=stream.id, tokens=[5], finish="length")]
    both.end(later)
    await both.until(lambda: both.state(0) == "the engine process ended while serving")


async def test_what_a_replica_could_not_begin_in_its_last_seconds_goes_on(two: Two) -> None:
    client, first, second, _ = two
    client.submit([2] * 200, PARAMS, replica=1)
    waiting, begun = client.submit([1], PARAMS), client.submit([1], PARAMS)
    (vector,) = client.submit_many([([4], Pooling(task="embed"))])
    await first.heard(3)
    first.answer(begun, 3)
    ended = [Tokens(id=stream.id, tokens=[], finish="abort") for stream in (waiting, begun)]
    first.say(Leaving(), Outputs([*ended, Failed(vector.id, 503, "the request was ended")]))
    moved = await second.heard(3)
    assert moved[1:] == [Add(waiting.id, [1], PARAMS), AddMany([Add(vector.id, [4], Pooling(task="embed"))])]
    async with asyncio.timeout(5):
        last = [output async for output in begun][-1]
    assert isinstance(last, Tokens) and last.finish == "abort"


async def test_a_replica_that_leaves_gets_nothing_new_and_what_it_refuses_goes_on(two: Two) -> None:
    client, first, second, both = two
    client.submit([2] * 200, PARAMS, replica=1)
    early, late = client.submit([1], PARAMS), client.submit([1], PARAMS)
    await first.heard(2)
    first.answer(early, 3)
    first.say(Leaving(), Outputs([Failed(late.id, 503, "the engine is shutting down")]))
    await both.until(lambda: client.replicas[0].leaving)
    client.submit([1], PARAMS)
    assert len(await second.heard(3)) == 3
    first.answer(early, 4, finish="length")
    async with asyncio.timeout(5):
        last = [output async for output in early][-1]
    assert isinstance(last, Tokens) and last.finish == "length"


async def test_together_they_can_do_what_each_of_them_can(address: Address) -> None:
    both = Replicated(address, Replicas(size=2, here=2))
    changes: list[Ready | None] = []
    both.client.on_change = lambda: changes.append(both.client.ready)
    first = await both.start(0, max_model_len=80)
    await both.start(1, max_model_len=60, max_num_seqs=2)
    ready = both.client.ready
    assert ready is not None
    worker = ready.worker
    assert (worker.max_model_len, worker.max_num_seqs, worker.num_blocks) == (60, 6, 2000)
    both.end(first)
    await both.until(lambda: both.state(0) != "works")
    assert [one.worker.max_model_len for one in changes if one is not None] == [80, 60, 60]
    assert changes[-1] is not None and changes[-1].worker.max_num_seqs == 2
    both.close()


async def test_numbers_of_all_are_summed(two: Two) -> None:
    client, first, second, both = two
    stats = Stats(
        running=1,
        waiting=2,
        kv_usage=0.5,
        prefix_queries=3,
        prefix_hits=1,
        preemptions=0,
        steps=4,
        step_tokens=5,
    )
    first.say(stats)
    second.say(msgspec.structs.replace(stats, kv_usage=0.0))
    await both.until(lambda: all(one.stats is not None for one in client.replicas))
    assert client.stats is not None
    assert (client.stats.running, client.stats.waiting, client.stats.kv_usage) == (2, 4, 0.25)


async def test_what_is_no_replica_of_the_others_is_sent_away(address: Address) -> None:
    both = Replicated(address, Replicas(size=2, here=2))
    await both.start(0)
    script = Script(address, 1)
    both.scripts.append(script)
    script.say(changed(READY, vocab_size=51))
    assert await script.heard(1) == [Drain(seconds=0)]
    assert both.state(1) == "it is no replica of the others: its vocab_size is 51, and that of the others 50"
    both.close()


async def test_a_number_that_nobody_may_have_is_passed_over(address: Address) -> None:
    both = Replicated(address, Replicas(size=2, here=2))
    stranger = Script(address, 2)
    both.scripts.append(stranger)
    stranger.say(READY)
    await both.start(0)
    assert [one.number for one in both.client.replicas] == [0, 1]
    both.close()


async def test_progress_is_that_of_the_first_and_tells_of_each(address: Address) -> None:
    both = Replicated(address, Replicas(size=3, here=3))
    for number, stage in ((0, "import"), (1, "weights")):
        script = Script(address, number)
        both.scripts.append(script)
        script.say(Progress(phase=stage, fraction=0.5, folder="/here", detail="rank 1 last" * number))
        await both.until(lambda stage=stage: both.client.progress.phase == stage)
    assert both.client.progress.fraction == 0.5
    assert both.client.progress.detail == (
        "replica 0: import 50%, replica 1: weights 50% (rank 1 last), replica 2 starts"
    )
    assert both.client.folder == "/here"
    both.close()


async def test_other_servers_requests_count_as_far_as_engines_tell(address: Address) -> None:
    both = Replicated(address, Replicas(size=2, here=2), servers=2)
    first, second = await both.start(0), await both.start(1)
    busy = Stats(
        running=9,
        waiting=0,
        kv_usage=0,
        prefix_queries=0,
        prefix_hits=0,
        preemptions=0,
        steps=0,
        step_tokens=0,
    )
    first.say(busy)
    await both.until(lambda: both.client.replicas[0].stats is not None)
    for _ in range(3):
        both.client.submit([1] * 10, PARAMS)
    assert len(await second.heard(3)) == 3
    both.close()


# Over a network.


def over_network(port: int, here: int = 1) -> Replicas:
    return Replicas(size=2, here=here, port=port, secret="a secret that all machines know")


async def test_a_replica_of_another_machine_joins_with_the_key_and_only_with_it(address: Address) -> None:
    port = free_ports(2)
    layout = over_network(port)
    both = Replicated(address, layout)
    await both.start(0)
    stranger = Script(
        msgspec.structs.replace(layout.tcp_address(0), secret="another secret, just as long"), 1
    )
    plain = Script(msgspec.structs.replace(layout.tcp_address(0), secret=None), 1)
    both.scripts += [stranger, plain]
    friend = Script(layout.tcp_address(0), 1)
    both.scripts.append(friend)
    for script in (stranger, plain, friend):
        script.say(changed(READY, max_num_seqs=3))
    await both.until(lambda: both.state(1) == "works")
    stream = both.client.submit([1], PARAMS, replica=1)
    assert [add.id for add in await friend.heard(1) if isinstance(add, Add)] == [stream.id]
    both.close()


async def test_a_machine_is_told_what_it_has_to_know(address: Address) -> None:
    layout = over_network(free_ports(4))
    both = Replicated(address, layout, servers=2)
    welcome = await asyncio.to_thread(join, layout.tcp_address(0))
    assert (welcome.servers, welcome.replicas, welcome.local_replicas) == (2, 2, 1)
    with pytest.raises(Refused, match="FACET_CLUSTER_KEY"):
        await asyncio.to_thread(
            join, msgspec.structs.replace(layout.tcp_address(0), secret="not the same one")
        )
    both.close()


async def test_a_machine_that_runs_no_engine_waits_for_the_next_one(address: Address) -> None:
    layout = over_network(free_ports(2), here=0)
    both = Replicated(address, layout)
    assert both.client.ready is None
    first = await both.start(1, at=layout.tcp_address(0))
    both.end(first)
    await both.until(lambda: both.client.ready is None)
    assert both.client.dead is None
    stream = both.client.submit([1], PARAMS)
    assert await anext(stream) == Failed(stream.id, 503, "no engine can take requests now")
    await both.start(0, at=layout.tcp_address(0))
    assert both.client.ready is not None
    both.close()
