"""Requests from admission to their last delta, against a scripted engine."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_client import FakeClient
from reading import beginning, generate, started

from engine_core.engine_stats import Stats
from server.access.client_identity import Caller
from server.errors import (
    READY,
    ApiError,
    BadRequest,
    Internal,
    NotFound,
    Overloaded,
    Status,
    TooManyRequests,
    Unavailable,
    loading,
)
from server.frontend.frontend import Frontend
from server.frontend.text_output import ALL_TOKENS
from server.metrics.server_metrics import Metrics
from server.options.parse_server_options import parse
from server.requests.pooling import PooledText
from server.requests.sampling_params import SamplingParams
from worker.protocol import Pooling

Make = Callable[..., Frontend]
GetReady = Callable[..., Awaitable[Frontend]]


def ids(frontend: Frontend, text: str) -> list[int]:
    return frontend.tokenizer.encode(text)


async def test_the_start_is_told_stage_by_stage(client: FakeClient, folder: Path, make: Make) -> None:
    frontend = make()
    assert frontend.status == loading("start", 0.0)
    with pytest.raises(Unavailable, match=r"still loading \(stage start, 0%\)"):
        generate(frontend, [1], SamplingParams())
    with pytest.raises(Unavailable):
        _ = frontend.facts
    start = asyncio.create_task(frontend.start())
    client.locate(folder)
    await asyncio.sleep(0)
    assert frontend.status == loading("import", 0.0)
    client.become_ready()
    assert frontend.status == loading("tokenizer", 0.0)
    await start
    assert frontend.status == READY
    facts = frontend.facts
    assert facts.model_names == ("m", "other")
    assert (facts.root, facts.max_model_len, facts.vocab_size) == ("m", 100, 450)
    assert facts.eos_token_ids == (frontend.tokenizer.token_id("</s>"), 7, 8)
    assert facts.defaults == {"temperature": 0.5}


async def test_an_engine_that_dies_while_it_starts(client: FakeClient, make: Make) -> None:
    frontend = make()
    start = asyncio.create_task(frontend.start())
    await asyncio.sleep(0)
    client.fail("no memory")
    with pytest.raises(Unavailable, match="no memory"):
        await start
    assert frontend.status == Status("dead", "engine_given_up", fraction=0.0, refuses=True)


async def test_which_model(client: FakeClient, frontend: Frontend) -> None:
    for name in (None, "m", "other"):
        frontend.check_model(name)
    with pytest.raises(NotFound, match=r"The model `x` does not exist. Valid aliases: m, other") as caught:
        frontend.check_model("x")
    assert caught.value.param == "model"


async def test_a_model_without_a_name_may_be_called_by_its_path(client: FakeClient, folder: Path) -> None:
    frontend = Frontend(parse([str(folder)], {}), client, Metrics("m"))  # pyright: ignore[reportArgumentType]
    client.locate(folder)
    client.become_ready()
    await frontend.start()
    for name in (folder.name, str(folder)):
        frontend.check_model(name)
    with pytest.raises(NotFound) as caught:
        frontend.check_model("x")
    assert str(folder) not in caught.value.message


async def test_a_folder_that_was_removed_since_is_found_again(client: FakeClient, folder: Path) -> None:
    """Who clears the cache takes what was made of a GGUF file. The engine goes on without it."""
    frontend = Frontend(parse([str(folder)], {}), client, Metrics("m"))  # pyright: ignore[reportArgumentType]
    client.locate(folder / "removed")
    client.become_ready()
    await frontend.start()
    assert (frontend.folder, frontend.status) == (folder, READY)


async def test_one_request(client: FakeClient, frontend: Frontend) -> None:
    prompt = ids(frontend, "the")
    task = await started(
        generate(frontend, prompt, SamplingParams(seed=3, max_tokens=9), priority=2, salt="s")
    )
    [request] = client.submitted
    assert request.tokens == prompt
    assert request.options == {
        "priority": 2,
        "salt": "s",
        "streams": True,
        "times_each": False,
        "most_guesses": None,
    }
    assert (request.params.seed, request.params.max_tokens, request.params.temperature) == (3, 9, 0.5)
    assert frontend.live == 1
    request.say(ids(frontend, " quick"), cached=1)
    request.say([*ids(frontend, " fox"), 7], finish="stop")
    deltas = await task
    assert "".join(delta.text for delta in deltas) == " quick fox"
    assert [delta.finish_reason for delta in deltas][-1] == "stop"
    assert deltas[0].cached_tokens == 1
    assert frontend.live == 0


@pytest.mark.parametrize(
    ("params", "interval", "streams", "times_each", "most_guesses"),
    [
        (SamplingParams(), 1, True, False, None),
        (SamplingParams(speculative_tokens=0), ALL_TOKENS, False, False, 0),
        (SamplingParams(stop="."), ALL_TOKENS, False, True, None),
    ],
)
async def test_the_engine_knows_who_reads_and_who_may_end_the_text(
    client: FakeClient,
    ready: GetReady,
    params: SamplingParams,
    interval: int,
    streams: bool,
    times_each: bool,
    most_guesses: int | None,
) -> None:
    task = await started(generate(await ready(), [1], params, interval=interval))
    [request] = client.submitted
    told = {"streams": streams, "times_each": times_each, "most_guesses": most_guesses}
    assert request.options == told
    request.say([9], finish="length")
    await task


async def test_choices_share_a_group(client: FakeClient, frontend: Frontend) -> None:
    tasks = [await started(generate(frontend, [1], SamplingParams(n=2))) for _ in range(2)]
    first, second, third, fourth = (one.options.get("group") for one in client.submitted)
    assert first and first == second != third == fourth
    for one in client.submitted:
        one.say([9], finish="length")
    await asyncio.gather(*tasks)


async def test_what_is_wrong_is_told_before_anything_is_sent(client: FakeClient, frontend: Frontend) -> None:
    with pytest.raises(BadRequest):
        generate(frontend, [1], SamplingParams(temperature=3))
    with pytest.raises(BadRequest):
        generate(frontend, [1] * 100, SamplingParams())
    assert frontend.live == 0
    generate(frontend, [1], SamplingParams())  # never iterated: never sent
    assert not client.submitted


async def test_choices_interleave_as_they_come(client: FakeClient, frontend: Frontend) -> None:
    stream = generate(frontend, [1], SamplingParams(n=3, seed=5))
    task = await started(stream)
    assert [one.params.seed for one in client.submitted] == [5, 6, 7]
    token = ids(frontend, "a")
    for i, finish in ((2, None), (0, "length"), (1, None), (2, "length"), (1, "length")):
        client.submitted[i].say(token, finish=finish)
        await asyncio.sleep(0)
    deltas = await task
    assert [delta.index for delta in deltas if delta.finish_reason] == [0, 2, 1]
    for index, text in enumerate(("a", "aa", "aa")):
        assert "".join(delta.text for delta in deltas if delta.index == index) == text


async def test_a_slow_reader_finds_the_rest_in_one_piece(client: FakeClient, frontend: Frontend) -> None:
    stream = generate(frontend, [1], SamplingParams())
    task = await started(stream)
    for _ in range(50):
        client.submitted[0].say(ids(frontend, "a"))
    client.submitted[0].say([], finish="length")
    deltas = await task
    assert len(deltas) == 1
    assert deltas[0].text == "a" * 50


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_the_stream_ends_the_request_in_the_engine(
    client: FakeClient, frontend: Frontend, n: int
) -> None:
    stream = generate(frontend, [1], SamplingParams(n=n))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.submitted[0].say(ids(frontend, "a"))
    assert (await first).text == "a"
    await stream.aclose()
    assert sorted(client.aborted) == [*range(1, n + 1)]
    assert frontend.live == 0
    await asyncio.wait_for(frontend.idle.wait(), 60)


async def test_a_cancelled_reader_ends_the_request_too(client: FakeClient, frontend: Frontend) -> None:
    task = await started(generate(frontend, [1], SamplingParams()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.aborted == [1]


async def test_a_stop_string_ends_its_choice_alone(client: FakeClient, frontend: Frontend) -> None:
    task = await started(generate(frontend, [1], SamplingParams(n=2, stop=["x"])))
    client.submitted[0].say(ids(frontend, "axb"))
    while not client.aborted:
        await asyncio.sleep(0)
    assert client.aborted == [1]
    client.submitted[1].say(ids(frontend, "ab"), finish="length")
    deltas = await task
    ends = {delta.index: (delta.finish_reason, delta.stop_reason) for delta in deltas if delta.finish_reason}
    assert ends == {0: ("stop", "x"), 1: ("length", None)}


@pytest.mark.parametrize(("code", "kind"), [(400, BadRequest), (500, Internal), (503, Unavailable)])
async def test_failures_of_the_engine(
    client: FakeClient, frontend: Frontend, code: int, kind: type[ApiError]
) -> None:
    task = await started(generate(frontend, [1], SamplingParams(n=2)))
    client.submitted[1].fail(code, "it broke")
    with pytest.raises(kind, match="it broke"):
        await task
    assert 1 in client.aborted
    assert frontend.live == 0


async def test_requests_end_by_their_names(client: FakeClient, frontend: Frontend) -> None:
    tasks = [
        await started(generate(frontend, [1], SamplingParams(n=2), request_id="a")),
        await started(generate(frontend, [1], SamplingParams(), request_id="a")),
        await started(generate(frontend, [1], SamplingParams(), request_id="b")),
    ]
    assert await frontend.abort(["a", "unknown"]) == 1
    assert sorted(client.aborted) == [1, 2, 3]
    for task in tasks[:2]:
        assert {delta.finish_reason for delta in await task} == {"abort"}
    assert not tasks[2].done()
    client.submitted[3].say([], finish="length")
    await tasks[2]
    assert await frontend.abort(["a", "b"]) == 0


async def test_a_full_queue_refuses_and_tells_when_to_come_back(client: FakeClient, ready: GetReady) -> None:
    frontend = await ready("--max-num-queued-reqs", "1")
    tasks = [await started(generate(frontend, [1], SamplingParams())) for _ in range(5)]  # 4 run, 1 waits
    with pytest.raises(Overloaded, match="currently busy") as caught:
        generate(frontend, [1], SamplingParams())
    assert 1 <= int(caught.value.headers()["Retry-After"]) <= 60
    client.submitted[0].say([], finish="length")
    await tasks[0]
    generate(frontend, [1], SamplingParams())
    client.stats = Stats(1, 3, 1.0, 0, 0, 0, 0, 0)  # memory is short: the engine lets fewer run
    with pytest.raises(Overloaded):
        generate(frontend, [1], SamplingParams())
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_draining_ends_what_runs_and_takes_nothing_new(client: FakeClient, frontend: Frontend) -> None:
    task = await started(generate(frontend, [1], SamplingParams()))
    frontend.begin_drain(refuse=True)
    assert frontend.status == Status("draining", "draining", fraction=0.0, refuses=True)
    with pytest.raises(Unavailable, match="shutting down") as caught:
        generate(frontend, [1], SamplingParams())
    assert "Retry-After" in caught.value.headers()
    drained = asyncio.create_task(frontend.idle.wait())
    await asyncio.sleep(0)
    assert not drained.done()
    client.submitted[0].say(ids(frontend, "a"), finish="length")
    assert (await task)[-1].text == "a"
    await asyncio.wait_for(drained, 60)


async def test_requests_are_logged_if_asked(ready: GetReady, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server.frontend.engine_requests")
    generate(await ready(), [1, 2], SamplingParams(), request_id="quiet")
    generate(await ready("--enable-log-requests"), [1, 2], SamplingParams(seed=5), request_id="loud")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["request loud"]
    assert "seed=5" in caplog.text


async def test_answers_are_logged_if_asked(
    client: FakeClient, ready: GetReady, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.frontend.engine_requests")
    frontend = await ready("--enable-log-outputs")
    task = await started(generate(frontend, [1], SamplingParams(), request_id="it"))
    client.submitted[0].say(ids(frontend, "a\nb"))
    client.submitted[0].say(ids(frontend, "c"), finish="length")
    await task
    assert caplog.messages == ["request it: choice 0, length: 'a\\nbc'"]


async def test_every_request_is_counted_by_its_end(client: FakeClient, frontend: Frontend) -> None:
    task = await started(generate(frontend, [1, 2], SamplingParams()))
    client.submitted[0].say([9, 9, 9], finish="length")
    await task
    task = await started(generate(frontend, [1, 2], SamplingParams()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    page = frontend.metrics.page().decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0' in page
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0' in page
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 4.0' in page
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 3.0' in page


async def test_requests_end_for_their_owner_alone(client: FakeClient, frontend: Frontend) -> None:
    mine, theirs = Caller("me"), Caller("them")
    admissions = [frontend.admissions.admit(caller, 1) for caller in (mine, theirs)]
    ids = [admission.take_id("cmpl-same") for admission in admissions]
    assert ids[0] == "cmpl-same" and ids[1].startswith("cmpl-same-")
    tasks = [
        await started(generate(frontend, [1], SamplingParams(), admission=admission))
        for admission in admissions
    ]
    assert await frontend.abort(ids, mine) == 1
    assert client.aborted == [1]
    assert await frontend.abort(["cmpl-same"], theirs) == 0
    await tasks[0]
    assert await frontend.abort(ids) == 1
    assert client.aborted == [1, 2]
    await tasks[1]
    assert frontend.admissions.admit(mine, 1).take_id("cmpl-same") == "cmpl-same"


# Requests that lose their places to others, from admission to the error that the client gets.


async def test_a_request_whose_places_others_get_ends_with_an_error(
    client: FakeClient, ready: GetReady
) -> None:
    frontend = await ready("--max-num-queued-reqs", "0")
    busy, other = Caller("busy"), Caller("other")
    first = frontend.admissions.admit(busy, 2)
    generation = await started(generate(frontend, [1], SamplingParams(n=2), admission=first))
    second = frontend.admissions.admit(busy, 2)
    pooling = await beginning(
        frontend.engine_requests.pool([PooledText([1], Pooling(task="embed"))] * 2, second)
    )
    late = frontend.admissions.admit(other, 1)
    with pytest.raises(TooManyRequests, match="newest of your requests") as caught:
        await pooling
    assert caught.value.headers()["Retry-After"] == "5"
    assert client.aborted == [3, 4] and not generation.done()
    assert frontend.live == 3
    late.release()
    client.submitted[0].say([5], finish="length")
    client.submitted[1].say([5], finish="length")
    assert len(await generation) == 2
    assert "admission_rejections_total{" in frontend.metrics.page().decode()


async def test_a_request_that_lost_its_places_before_it_was_sent_is_not_sent(
    client: FakeClient, ready: GetReady
) -> None:
    frontend = await ready("--max-num-queued-reqs", "0")
    mine = frontend.admissions.admit(Caller("busy"), 4)
    frontend.admissions.admit(Caller("other"), 1)
    with pytest.raises(TooManyRequests):
        generate(frontend, [1], SamplingParams(n=4), admission=mine)
    with pytest.raises(TooManyRequests):
        await frontend.engine_requests.pool([PooledText([1], Pooling(task="embed"))] * 2, mine)
    assert not client.submitted


async def test_the_tokenizer_of_a_model_that_goes_needs_no_collector(ready: GetReady) -> None:
    frontend = await ready()
    tokenizer = weakref.ref(frontend.tokenizer)
    frontend.tokenizer.decode(ids(frontend, "the fox"))
    gc.disable()
    try:
        frontend.__dict__.clear()
        await asyncio.sleep(0)
        assert tokenizer() is None
    finally:
        gc.enable()
