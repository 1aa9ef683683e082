"""Engine processes that are killed, and started again, while requests run; one that kills them is found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from fake_worker import HANGS_STEP, KILLS_PROCESS, reference
from started_engines import Start, collect, first, soon, text, until

from engine_core.client.client import EngineClient
from engine_core.engine_processes import EngineProcesses
from engine_core.protocol import QUARANTINED, Failed
from engine_core.restarts import keep_engines
from worker.protocol import Sampling


class Watcher:
    """Passes on to the client what becomes of engines, and remembers exit codes."""

    def __init__(self, client: EngineClient) -> None:
        self.engine_given_up = client.engine_given_up
        self.engine_stalled = client.engine_stalled
        self.codes: list[int] = []
        self._client = client

    def engine_exited(self, number: int, code: int) -> None:
        self.codes.append(code)
        self._client.engine_exited(number, code)


Kept = Callable[..., Awaitable[tuple[EngineProcesses, EngineClient, list[int]]]]


@pytest_asyncio.fixture
async def kept(start: Start, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    """Engines of which each is started again at once when it ends, their client, and all exit codes."""
    monkeypatch.setattr("engine_core.restarts.PAUSES", (0.0,) * 5)
    keeping: list[asyncio.Task[None]] = []

    async def begin(**options: object) -> tuple[EngineProcesses, EngineClient, list[int]]:
        engines, client = await start(restart_wait=30.0, **options)
        engines.worked = True
        watcher = Watcher(client)
        keeping.append(asyncio.create_task(keep_engines(engines, watcher)))
        return engines, client, watcher.codes

    yield begin
    for task in keeping:
        task.cancel()


async def test_answers_go_on_where_a_killed_engine_stopped(kept: Kept) -> None:
    engines, client, codes = await kept(max_num_seqs=4)
    streams = [client.submit([n], Sampling(max_tokens=100)) for n in range(8)]
    for stream in (streams[0], streams[7]):
        await first(stream)
        ends = len(codes)
        engines.engines[0].process.kill()
        await soon(until(lambda: len(codes) > ends))  # noqa: B023
    for n, outputs in enumerate(await asyncio.gather(*map(collect, streams))):
        rest = text(outputs)
        assert rest and rest == reference([n], 100)[-len(rest) :], "what was read before is not there"
        assert n in (0, 7) or len(rest) == 100


@pytest.mark.parametrize("replicas", [1, 2])
async def test_one_that_kills_is_found_in_three_restarts(kept: Kept, replicas: int) -> None:
    _, client, codes = await kept(max_num_seqs=16, replicas=replicas)
    await soon(until(lambda: sum(one.works for one in client.replicas) == replicas))
    streams = [client.submit([n], Sampling(max_tokens=40)) for n in range(15)]
    bad = client.submit([KILLS_PROCESS], Sampling(max_tokens=40))
    [failed] = await collect(bad)
    assert isinstance(failed, Failed) and (failed.code, failed.error) == (500, QUARANTINED)
    answers = await asyncio.gather(*map(collect, streams))
    assert [text(outputs) for outputs in answers] == [reference([n], 40) for n in range(15)]
    assert codes == [-9] * 3
    [refused] = await collect(client.submit([KILLS_PROCESS], Sampling(max_tokens=40, seed=3)))
    assert isinstance(refused, Failed) and refused.error == QUARANTINED and codes == [-9] * 3


async def test_one_whose_steps_never_end_is_found_in_three_restarts(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.stalls.STALL_SECONDS", 1.5)
    monkeypatch.setattr("engine_core.stalls.KILL_SECONDS", 3.0)
    _, client, codes = await kept(max_num_seqs=16)
    streams = [client.submit([n], Sampling(max_tokens=40)) for n in range(15)]
    bad = client.submit([HANGS_STEP], Sampling(max_tokens=40))
    [failed] = await collect(bad, 60)
    assert isinstance(failed, Failed) and (failed.code, failed.error) == (500, QUARANTINED)
    answers = await asyncio.gather(*map(collect, streams))
    assert [text(outputs) for outputs in answers] == [reference([n], 40) for n in range(15)]
    assert codes == [-9] * 3
