"""The processes of engines as the program that starts them sees them: folder, ends and restarts."""

import asyncio
import signal

import pytest
from fake_worker import reference
from started_engines import EngineEnds, Start, collect, soon, text, until

from engine_core.client.client import EngineClient
from engine_core.restarts import NoWatcher, keep_engines
from worker.protocol import Sampling


async def test_stop_leaves_no_folder(start: Start) -> None:
    engines, _ = await start()
    folder = engines.run_folder
    assert engines.stop(5) == [0]
    assert not folder.exists()


async def test_an_engine_killed_while_it_loads_is_explained(start: Start) -> None:
    engines, client = await start(ready=False, restart_wait=1.0, hf_overrides={"slow": True})
    keeping = asyncio.create_task(keep_engines(engines, client))
    await soon(until(lambda: client.progress.phase == "weights"))
    engines.engines[0].process.kill()
    await soon(client.died.wait())
    assert client.dead == (
        "the engine process ended while loading weights: "
        "it was ended by SIGKILL, most likely because memory ran out (`dmesg` tells)"
    )
    assert not client.explained, "nobody has printed this yet"
    await soon(keeping)


async def test_a_start_that_hangs_ends_and_the_server_says_why(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: dict[str, object] = {"hf_overrides": {"slow": True}, "engine_ready_timeout": 1.0}
    engines, client = await start(ready=False, restart_wait=1.0, **slow)
    keeping = asyncio.create_task(keep_engines(engines, client))
    await soon(client.died.wait())
    reason = "it showed no progress of its start for 1 s (--engine-ready-timeout) and was killed"
    assert client.dead is not None and client.dead.startswith(f"the engine has ended: {reason}: what it")
    await soon(keeping)


def working(client: EngineClient) -> list[int]:
    return [one.number for one in client.replicas if one.works]


async def test_a_replica_that_breaks_is_started_again_and_one_that_is_asked_to_end_is_not(
    start: Start,
) -> None:
    engines, client = await start(replicas=2, restart_wait=1.0)
    await soon(until(lambda: working(client) == [0, 1]))
    ends = EngineEnds(client)
    keeping = asyncio.create_task(keep_engines(engines, ends))
    engines.engines[1].process.kill()
    await soon(until(lambda: working(client) == [0]))
    await soon(until(lambda: working(client) == [0, 1]))
    assert ends.exits == [(1, -signal.SIGKILL)]
    assert text(await collect(client.submit([3], Sampling(max_tokens=3), replica=1))) == reference([3], 3)
    for engine in engines.engines:
        engine.process.terminate()
    await soon(keeping)
    assert sorted(ends.exits[1:]) == sorted(ends.given_up) == [(0, 0), (1, 0)]
    assert client.dead == "the engine has been stopped"


async def test_an_only_engine_that_has_served_is_started_again_whatever_ends_it(start: Start) -> None:
    engines, client = await start(restart_wait=10.0)
    engines.worked = True
    ends = EngineEnds(client)
    keeping = asyncio.create_task(keep_engines(engines, ends))
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        engines.engines[0].process.signal(number)
        await soon(until(lambda: client.ready is None))
        stream = client.submit([3], Sampling(max_tokens=3))  # it waits for the engine
        assert text(await collect(stream)) == reference([3], 3)
        assert ends.exits.pop() == (0, code)
    assert client.ready is not None and client.ready.start_seconds > 0
    keeping.cancel()


async def test_an_engine_that_ends_while_all_shall_end_is_not_started_again(start: Start) -> None:
    engines, _ = await start(restart_wait=1.0)
    engines.worked = True
    engines.terminate()
    await soon(keep_engines(engines, NoWatcher()))
    assert engines.engines[0].exit_code == 0
