"""The client against one engine that is scripted by the test."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from scripted_engine import PARAMS, READY, Script, all_of, next_of

from engine_core.client.client import EngineClient
from engine_core.client.dispatcher import Dispatcher
from engine_core.config import Address
from engine_core.protocol import AddRequest, AddRequests, Admitted, Dead, Failed, Outputs, Pooled, Tokens
from engine_core.wire import transport
from worker.protocol import Pooling, TokenLogprobs, Vectors

Pair = tuple[EngineClient, Script]


@pytest_asyncio.fixture
async def pair(address: Address) -> AsyncIterator[Pair]:
    client, script = EngineClient(address), Script(address)
    script.send(READY)
    yield client, script
    client.close()
    script.close()


async def submit(client: EngineClient, script: Script, count: int = 1) -> list:
    """Submit requests; returns their streams once they have arrived at the engine."""
    streams = []
    async with asyncio.timeout(60):
        while len(streams) < count:
            stream = client.submit([1], PARAMS)
            if client.open_streams > len(streams):
                streams.append(stream)
            await asyncio.sleep(0.001)
    assert [add.id for add in await script.received(count) if isinstance(add, AddRequest)] == [
        s.id for s in streams
    ]
    return streams


async def test_ids_are_unique_and_not_guessed_by_a_successor(pair: Pair) -> None:
    first, second = await submit(*pair, count=2)
    assert first.id != second.id
    assert first.id > 1000


async def test_the_engine_gets_the_options_of_a_request(pair: Pair) -> None:
    client, script = pair
    await submit(client, script)
    group = client.new_number()
    stream = client.submit([1], PARAMS, priority=-1, salt="s", group=group, streams=True, times_each=True)
    options = {"priority": -1, "salt": "s", "group": group, "streams": True, "times_each": True}
    assert stream.id != group
    assert await script.received(1) == [AddRequest(id=stream.id, tokens=[1], params=PARAMS, **options)]


async def test_a_notice_that_a_request_waits_is_read_before_its_tokens(
    pair: Pair,
) -> None:
    client, script = pair
    first, second, third = await submit(client, script, 3)
    reading = asyncio.ensure_future(anext(first))  # it waits when the notice comes
    await asyncio.sleep(0)
    for stream in (first, second, third):
        script.send(Outputs([Admitted(id=stream.id, expected=2.5)]))
    async with asyncio.timeout(60):
        assert await reading == Tokens(id=first.id, tokens=[], expected=2.5)
        assert await anext(second) == Tokens(id=second.id, tokens=[], expected=2.5)
        script.answer(second, 1, finish="stop", cached=3, expected=2.5)
        assert await anext(second) == Tokens(id=second.id, tokens=[1], finish="stop", cached=3, expected=2.5)
        script.answer(third, 7, cached=3, expected=2.5)
        script.answer(third, 8, finish="stop")
        while client.open_streams > 1:
            await asyncio.sleep(0.001)
        whole = Tokens(id=third.id, tokens=[7, 8], finish="stop", cached=3, expected=2.5)
        assert await anext(third) == whole, "a notice is not needed any more once there are tokens"


async def test_what_came_together_is_read_as_one(pair: Pair) -> None:
    client, script = pair
    (stream,) = await submit(client, script)
    entry = TokenLogprobs(ids=[1], values=[-1.0], rank=1)
    script.send(
        Outputs([Tokens(id=stream.id, tokens=[1], logprobs=[entry], prompt_logprobs=[entry], cached=16)]),
        Outputs([Tokens(id=stream.id, tokens=[2], logprobs=[entry])]),
        Outputs([Tokens(id=stream.id, tokens=[3], logprobs=[entry], finish="stop")]),
    )
    async with asyncio.timeout(60):
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


async def test_tokens_before_a_failure_are_not_lost(pair: Pair) -> None:
    client, script = pair
    (stream,) = await submit(client, script)
    failed = Failed(id=stream.id, code=500, message="broke")
    script.send(Outputs([Tokens(id=stream.id, tokens=[1])]), Outputs([failed]))
    assert await all_of(stream) == [Tokens(id=stream.id, tokens=[1]), failed]


async def test_death_ends_each_open_stream_once(pair: Pair) -> None:
    client, script = pair
    ended, *streams = await submit(client, script, count=3)
    script.send(Outputs([Tokens(id=ended.id, tokens=[1], finish="length")]), Dead("out of order"))
    async with asyncio.timeout(60):
        await client.died.wait()
        client.fail("something later")
        assert [output.finish async for output in ended] == ["length"]
        for stream in streams:
            assert await all_of(stream) == [Failed(stream.id, 503, "out of order", "engine_given_up")]
    assert client.dead == "out of order"


async def test_an_engine_of_another_version_is_refused(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient(address)
    monkeypatch.setattr(transport, "PROTOCOL", "another")
    script = Script(address)
    async with asyncio.timeout(60):
        await client.died.wait()
    assert client.dead is not None and "another version" in client.dead
    client.close()
    script.close()


async def test_many_requests_travel_in_few_frames(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    client, script = pair
    await submit(client, script)  # requests can be sent to the engine
    monkeypatch.setattr("engine_core.client.dispatcher._TOKENS_IN_MESSAGE", 10)
    params = Pooling(task="embed")
    prompts = [[1] * 4, [2] * 6, [3] * 30, [4]]
    streams = client.submit_many([(prompt, params) for prompt in prompts], priority=2, salt="s")
    frames = await script.received(3)
    adds = [add for frame in frames if isinstance(frame, AddRequests) for add in frame.adds]
    assert [len(frame.adds) for frame in frames if isinstance(frame, AddRequests)] == [2, 1, 1]
    assert adds == [
        AddRequest(id=stream.id, tokens=prompt, params=params, priority=2, salt="s")
        for stream, prompt in zip(streams, prompts, strict=True)
    ]
    first, second, third, fourth = streams
    vectors = Vectors(b"\0\0\0\0", (1,))
    script.send(Outputs([Pooled(first.id, vectors, cached=1), Failed(second.id, 500, "broke")]))
    assert await all_of(first) == [Pooled(first.id, vectors, cached=1)]
    assert await next_of(second) == Failed(second.id, 500, "broke")
    client.abort([third.id])
    assert (await next_of(third)).code == 503
    client.fail("gone")
    assert await next_of(fourth) == Failed(fourth.id, 503, "gone", "engine_given_up")
    (late,) = client.submit_many([([1], params)])
    assert await anext(late) == Failed(late.id, 503, "gone", "engine_given_up")
    assert client.submit_many([]) == []


async def test_a_frame_that_is_too_large_fails_its_own_requests(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, script = pair
    await submit(client, script)
    monkeypatch.setattr("engine_core.wire.transport.MAX_REQUEST_BYTES", 1000)
    monkeypatch.setattr("engine_core.client.dispatcher._TOKENS_IN_MESSAGE", 10)
    params = Pooling(task="embed")
    large, small = client.submit_many([([1] * 2000, params), ([1], params)])
    async with asyncio.timeout(60):
        refused = await anext(large)
        assert isinstance(refused, Failed) and refused.code == 400
        (frame,) = await script.received(1)
        assert isinstance(frame, AddRequests) and frame.adds[0].id == small.id


async def test_an_answer_that_cannot_be_handled_ends_the_client(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, script = pair
    (stream,) = await submit(client, script)
    monkeypatch.setattr(Dispatcher, "deliver", lambda *_: 1 / 0)
    script.answer(stream, 1)
    async with asyncio.timeout(60):
        await client.died.wait()
        assert [type(output) for output in [output async for output in stream]] == [Failed]
    assert client.broke and client.dead == "the server could not handle an answer of an engine"
