"""The two loops: how many run at once, when they are due, when they end."""

import asyncio
import statistics
from itertools import islice, pairwise

import pytest
from scripted_server import Reply, Request, completes, scripted, whole

from server.bench.endpoints import Outcome, Sender, endless_requests
from server.bench.http_client import Client
from server.bench.load_generator import Load, arrivals, run_load
from server.bench.serve_options import LoadOptions

OPTIONS = LoadOptions(random_input_len=5, random_output_len=3)


async def run(load: Load, url: str, options: LoadOptions = OPTIONS) -> list[Outcome]:
    outcomes: list[Outcome] = []
    client = Client(url)
    await run_load(load, Sender(client, "m", options), endless_requests(options), outcomes.append)
    client.close()
    return outcomes


def together(count: int) -> Reply:
    """A reply that comes once so many requests have come."""
    came = 0
    all_came = asyncio.Event()

    async def reply(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        if came == count:
            all_came.set()
        await all_came.wait()
        await completes(request, writer)

    return reply


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_a_closed_loop_keeps_so_many_running(concurrency: int) -> None:
    async with scripted(together(concurrency)) as server:
        outcomes = await run(Load(concurrency=concurrency, requests=20), server.url)
    assert [outcome.error for outcome in outcomes] == [None] * 20
    assert server.most_running == server.connections == concurrency
    assert {(o.input_tokens, o.output_tokens, len(o.times)) for o in outcomes} == {(5, 3, 1)}


async def test_without_bounds_all_go_at_once() -> None:
    async with scripted(together(12)) as server:
        assert len(await run(Load(requests=12), server.url)) == 12
    assert server.most_running == 12


async def test_a_duration_ends_both_loops() -> None:
    async with scripted(completes) as server:
        closed = await run(Load(concurrency=2, seconds=0.3), server.url)
        opened = await run(Load(rate=200, seconds=0.3), server.url)
    assert 2 <= len(closed) <= 300
    assert 2 <= len(opened) <= 150
    assert len(server.requests) == len(closed) + len(opened)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    async with scripted(together(10)) as server:
        await run(Load(rate=500, requests=10), server.url)
    assert server.most_running == 10


async def test_time_runs_from_when_a_request_was_due() -> None:
    """Five requests are due at once and go one after the other, so the last has waited for all."""
    async with scripted(completes) as server:
        outcomes = await run(Load(concurrency=1, rate=1e9, requests=5), server.url)
    assert server.most_running == 1
    waits = sorted(outcome.e2el for outcome in outcomes)
    assert waits[-1] >= 5 * 0.002
    assert max(o.due for o in outcomes) - min(o.due for o in outcomes) < 1e-6


async def test_failures_are_outcomes_too() -> None:
    async def alternate(request: Request, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) % 2:
            writer.write(whole({"error": {"message": "full"}}, 503))
        else:
            await completes(request, writer)

    async with scripted(alternate) as server:
        outcomes = await run(Load(concurrency=1, requests=6), server.url)
    assert [(outcome.error, outcome.detail) for outcome in outcomes] == [("HTTP 503", "full"), (None, "")] * 3


async def test_a_dead_server_fails_each_request() -> None:
    async with scripted(completes) as server:
        url = server.url
    outcomes = await run(Load(concurrency=2, requests=5), url)
    assert [outcome.error for outcome in outcomes] == ["connection refused"] * 5


async def test_embeddings_count_inputs() -> None:
    options = LoadOptions(endpoint="embeddings", random_batch_size=4, random_input_len=6)
    async with scripted(completes) as server:
        outcomes = await run(Load(concurrency=2, requests=3), server.url, options)
    assert {(o.inputs, o.input_tokens, o.output_tokens, o.ttft) for o in outcomes} == {(4, 24, 0, None)}


def gaps(load: Load, count: int) -> list[float]:
    return [later - earlier for earlier, later in pairwise(islice(arrivals(load), count))]


def test_arrivals_are_a_poisson_process_of_that_rate() -> None:
    found = gaps(Load(rate=10, seed=1), 20_000)
    assert statistics.mean(found) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(found) == pytest.approx(0.1, rel=0.05)  # of exponential gaps, as their mean


def test_burstiness_changes_the_spread_and_not_the_rate() -> None:
    even, bursty = (gaps(Load(rate=10, burstiness=b, seed=1), 20_000) for b in (100.0, 0.25))
    assert statistics.mean(even) == pytest.approx(0.1, rel=0.05)
    assert statistics.mean(bursty) == pytest.approx(0.1, rel=0.08)
    assert statistics.pstdev(even) == pytest.approx(0.01, rel=0.1)
    assert statistics.pstdev(bursty) == pytest.approx(0.2, rel=0.1)


def test_arrivals_are_the_same_for_a_seed() -> None:
    assert gaps(Load(rate=3, seed=5), 50) == gaps(Load(rate=3, seed=5), 50) != gaps(Load(rate=3, seed=6), 50)
