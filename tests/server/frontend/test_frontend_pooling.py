"""Texts that are pooled, from admission to the last vector, against a scripted engine."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest
from fake_client import FakeClient
from reading import beginning

from engine_core.engine_stats import Timing
from engine_core.protocol import Pooled
from server.access.request_state import RequestState
from server.errors import Internal, Overloaded, Unavailable
from server.frontend.asks.parts import Terms
from server.frontend.asks.pooling import Pool
from server.frontend.frontend import Frontend
from server.reading.body_table import ReadTexts
from server.requests.pooling import PooledText
from server.requests.vectors import as_array
from worker.protocol import Pooling

GetReady = Callable[..., Awaitable[Frontend]]


def items(count: int) -> list[PooledText]:
    return [PooledText([i % 400, 1], Pooling(task="embed")) for i in range(count)]


async def pool(frontend: Frontend, texts: list[PooledText], **more: Any) -> list[Pooled]:
    """Asks for texts as a program does. `more` are further terms."""
    with closing(RequestState(frontend=frontend)) as state:
        asked = Pool(terms=Terms(state, "r", 0, shares_id=True, **more), texts=ReadTexts(texts))
        return [*(await frontend.ask(asked)).pooled]


async def test_texts_are_pooled_in_order(client: FakeClient, frontend: Frontend) -> None:
    task = await beginning(pool(frontend, items(3), priority=2, salt="s"))
    assert [one.tokens for one in client.submitted] == [[0, 1], [1, 1], [2, 1]]
    assert [(one.options.get("priority"), one.options.get("salt")) for one in client.submitted] == [
        (2, "s")
    ] * 3
    assert frontend.live == 3
    for i in (2, 0, 1):
        client.submitted[i].answer([i], cached=i)
    answers = await task
    assert [(as_array(one.vectors).tolist(), one.cached) for one in answers] == [([0], 0), ([1], 1), ([2], 2)]
    assert frontend.live == 0 and not client.aborted
    page = frontend.metrics.page().decode()
    assert 'request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0' in page
    assert 'prompt_tokens_total{engine="0",model_name="m"} 6.0' in page


async def test_the_wait_of_later_texts_counts_as_queued(
    client: FakeClient, ready: GetReady, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("server.frontend.engine_requests.time.monotonic", lambda: now)
    task = await beginning(pool(await ready(), items(100)))
    timing = Timing(queued=0.5, prefill=1.0, decode=0.0, preemptions=0)
    for i in range(100):
        now = 100.0 + 2 * i
        while len(client.submitted) <= i:
            await asyncio.sleep(0)
        client.submitted[i].answer([i], timing=timing, expected=1.5)
        for _ in range(5):
            await asyncio.sleep(0)
    answers = await task
    assert [one.timing for one in answers[:2]] == [timing, timing]
    assert answers[0].expected == 1.5
    last = answers[-1]
    assert last.timing and last.expected
    assert (last.timing.prefill, last.expected - last.timing.queued) == (1.0, 1.0)
    assert 100.5 < last.timing.queued <= 198.5


async def test_ten_thousand_texts_go_to_the_engine_a_few_at_a_time(
    client: FakeClient, ready: GetReady
) -> None:
    frontend = await ready("--max-num-queued-reqs", "4")  # only the texts that are in the engine count
    task = await beginning(pool(frontend, items(10_000)))
    tasks = len(asyncio.all_tasks())
    most = 0
    for i in range(10_000):
        while len(client.submitted) <= i:
            await asyncio.sleep(0)
        most = max(most, frontend.live)
        client.submitted[i].answer([i])
    answers = await task
    assert [as_array(one.vectors)[0] for one in answers] == list(range(10_000))
    assert most <= 2 * frontend.facts.ready.worker.max_num_seqs
    assert tasks == 2  # the test, and the request


async def test_one_failure_ends_all_texts_of_a_request(client: FakeClient, frontend: Frontend) -> None:
    task = await beginning(pool(frontend, items(4)))
    client.submitted[0].answer([0])
    client.submitted[1].fail(500, "non-finite")
    with pytest.raises(Internal, match="non-finite"):
        await task
    assert client.aborted == [2, 3, 4] and frontend.live == 0


async def test_texts_nobody_waits_for_are_aborted(client: FakeClient, frontend: Frontend) -> None:
    task = await beginning(pool(frontend, items(3)))
    client.submitted[0].answer([0])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.aborted == [2, 3] and frontend.live == 0
    task = await beginning(pool(frontend, items(2)))
    assert await frontend.abort(["r"]) == 1
    with pytest.raises(Unavailable, match="aborted"):
        await task


async def test_texts_are_refused_when_the_queue_is_full(client: FakeClient, ready: GetReady) -> None:
    frontend = await ready("--max-num-queued-reqs", "0")
    task = await beginning(pool(frontend, items(5)))
    assert frontend.live == len(client.submitted) == 4, "as many as there are places"
    with pytest.raises(Overloaded):
        await pool(frontend, items(1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert frontend.live == 0
