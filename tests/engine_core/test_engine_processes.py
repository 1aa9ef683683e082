"""The processes of engines as the program that starts them sees them: folder, ends and restarts."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from fake_worker import reference
from sizes import engine_config
from started_engines import Start, collect, first, soon, text, until

from engine_core.client.client import EngineClient
from engine_core.engine_processes import EngineProcess, start_engines
from engine_core.protocol import Failed
from worker.protocol import Sampling


async def test_stop_leaves_no_folder(start: Start) -> None:
    engines, _ = await start()
    folder = engines.run_folder
    assert engines.stop(5) == [0]
    assert not folder.exists()


def test_a_folder_too_long_for_sockets_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ValueError, match="set TMPDIR"):
        start_engines(engine_config(model))


async def test_an_engine_killed_while_it_loads_is_explained(start: Start) -> None:
    engines, client = await start(ready=False, watched=True, hf_overrides={"slow": True})
    keeping = asyncio.create_task(engines.supervise(client.engine_exited))
    await soon(until(lambda: client.progress.phase == "weights"))
    engines.engines[0].process.kill()
    await soon(client.died.wait())
    assert client.dead == (
        "the engine process ended while loading weights: "
        "it was ended by SIGKILL (is memory short? `dmesg` tells)"
    )
    assert not client.explained, "nobody has printed this yet"
    await soon(keeping)


def working(client: EngineClient) -> list[int]:
    return [one.number for one in client.replicas if one.works]


async def test_a_killed_replica_takes_nothing_with_it_that_it_had_not_begun(start: Start) -> None:
    engines, client = await start(replicas=2, max_num_seqs=2)
    await soon(until(lambda: working(client) == [0, 1]))
    streams = [client.submit([n], Sampling(max_tokens=60)) for n in range(20)]
    await first(streams[0])
    engines.engines[0].process.kill()
    answers = await asyncio.gather(*map(collect, streams))
    failed = [n for n, outputs in enumerate(answers) if isinstance(outputs[-1], Failed)]
    assert 1 <= len(failed) <= 2, "those that ran, and no other"
    for n in set(range(20)) - set(failed) - {0}:
        assert text(answers[n]) == reference([n], 60)
    assert client.dead is None and working(client) == [1]


async def test_a_replica_that_breaks_is_started_again_and_one_that_is_asked_to_end_is_not(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.engine_processes.FIRST_PAUSE", 0.05)
    engines, client = await start(replicas=2)
    await soon(until(lambda: working(client) == [0, 1]))
    ends: list[tuple[int, int]] = []

    def lost(number: int, code: int) -> None:
        ends.append((number, code))
        client.engine_exited(number, code)

    keeping = asyncio.create_task(engines.supervise(lost))
    engines.engines[1].process.kill()
    await soon(until(lambda: working(client) == [0]))
    await soon(until(lambda: working(client) == [0, 1]))
    assert ends == [(1, -signal.SIGKILL)]
    assert text(await collect(client.submit([3], Sampling(max_tokens=3), replica=1))) == reference([3], 3)
    for engine in engines.engines:
        engine.process.terminate()
    await soon(keeping)
    assert sorted(ends[1:]) == [(0, 0), (1, 0)]
    assert client.dead == "the engine has been stopped"


async def test_a_replica_that_breaks_again_and_again_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.engine_processes.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("engine_core.engine_processes.RESTARTS", 2)
    engines, _ = await start(replicas=2)
    monkeypatch.setattr(EngineProcess, "start", lambda self: None)  # no new process lives
    for engine in engines.engines:
        engine.process.kill()
    told: list[int] = []
    await soon(engines.supervise(lambda number, _: told.append(number)))
    assert sorted(told) == [0, 0, 0, 1, 1, 1]
