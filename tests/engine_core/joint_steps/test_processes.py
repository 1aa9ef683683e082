"""Engines that share experts in processes of their own: they start, drain, end and come back together."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from fake_worker import KILLS_PROCESS, reference
from started_engines import Keep, collect, soon, text, until

from engine_core.client.client import EngineClient
from engine_core.client.in_flight import Stream
from engine_core.protocol import Failed, Tokens
from engine_core.reason_codes import QUARANTINED
from worker.child import CANNOT_START, STOPPED
from worker.protocol import Sampling


@pytest.fixture
def kept(keep: Keep, model: Path) -> Keep:
    """A function that starts engines which share experts, and are kept as a group."""
    described = json.loads((model / "config.json").read_text())
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    (model / "config.json").write_text(json.dumps(described | mixture))
    usual = {"replicas": 2, "enable_expert_parallel": True, "module": "sharing_engine"}
    return lambda **options: keep(together=True, restart_wait=60.0, **{**usual, **options})


def all_work(client: EngineClient) -> bool:
    return all(one.works for one in client.replicas)


async def begin(stream: Stream[Tokens]) -> list[Tokens | Failed]:
    """Wait for the first tokens of an answer."""
    async with asyncio.timeout(60):
        return [await anext(stream)]


async def rest(begun: list[Tokens | Failed], stream: Stream[Tokens]) -> list[int]:
    """All tokens of an answer, of which the first ones were read before."""
    ended = isinstance(begun[0], Tokens) and begun[0].finish is not None
    return text(begun if ended else [*begun, *await collect(stream)])


def rounds(model: Path, generation: int) -> list[list[int]]:
    """The tokens of each replica in each round, which ranks of all were told alike."""
    files = sorted(model.glob(f"experts-{generation}-*"))
    told = [[list(map(int, line.split())) for line in file.read_text().splitlines()] for file in files]
    shortest = min(told, key=len)
    assert len(files) == 2 and all(each[: len(shortest)] == shortest for each in told)
    return shortest


async def test_requests_anywhere_are_computed_in_rounds_of_all(kept: Keep, model: Path) -> None:
    engines, client, ends = await kept()
    await soon(until(lambda: all_work(client)))
    streams = [client.submit([n, 7], Sampling(max_tokens=20), replica=n % 2) for n in range(6)]
    for n, outputs in enumerate(await asyncio.gather(*map(collect, streams))):
        assert text(outputs) == reference([n, 7], 20)
    lonely = await collect(client.submit([9], Sampling(max_tokens=5), replica=1))
    assert text(lonely) == reference([9], 5)
    assert [0, 1] in rounds(model, 1)
    slow = client.submit([1], Sampling(max_tokens=60), replica=0)
    begun = await begin(slow)
    engines.leaving = True
    client.drain(60)
    assert await rest(begun, slow) == reference([1], 60)
    await soon(until(lambda: sorted(number for number, _ in ends.given_up) == [0, 1]))
    assert sorted(ends.exits) == [(0, 0), (1, 0)]
    assert [engine.exit_code for engine in engines.engines] == [0, 0]


async def test_one_that_is_asked_alone_to_end_waits_for_the_others_no_longer_than_it_may(kept: Keep) -> None:
    engines, client, ends = await kept(drain_seconds=0.5)
    await soon(until(lambda: all_work(client)))
    engines.engines[1].process.terminate()
    await soon(until(lambda: (1, STOPPED) in ends.exits))


@pytest.mark.parametrize("whom", ["engine", "rank"])
async def test_if_one_is_killed_all_come_back_and_answers_go_on(kept: Keep, model: Path, whom: str) -> None:
    engines, client, ends = await kept()
    await soon(until(lambda: all_work(client)))
    streams = [client.submit([n], Sampling(max_tokens=60), replica=n % 2) for n in range(4)]
    begun = [await begin(stream) for stream in streams]
    pid = engines.engines[1].process.pid if whom == "engine" else int((model / "pid-1").read_text())
    os.kill(pid, signal.SIGKILL)
    for n, answer in enumerate(await asyncio.gather(*map(rest, begun, streams))):
        assert answer == reference([n], 60)
    await soon(until(lambda: [engine.starts for engine in engines.engines] == [2, 2] and all_work(client)))
    assert sorted(number for number, _ in ends.exits) == [0, 1]
    again = await collect(client.submit([9], Sampling(max_tokens=5), replica=1))
    assert text(again) == reference([9], 5)
    assert rounds(model, 2), "they met at other paths than before"


async def test_a_request_that_ends_its_engine_is_found_and_those_of_others_are_not_blamed(
    kept: Keep, model: Path
) -> None:
    engines, client, _ = await kept()
    await soon(until(lambda: all_work(client)))
    others = [client.submit([n], Sampling(max_tokens=70), replica=1) for n in range(2)]
    begun = [await begin(stream) for stream in others]
    bad = client.submit([KILLS_PROCESS], Sampling(max_tokens=2), replica=0)
    (failed,) = await collect(bad)
    assert isinstance(failed, Failed) and failed.error == QUARANTINED
    for n, answer in enumerate(await asyncio.gather(*map(rest, begun, others))):
        assert answer == reference([n], 70)
    assert engines.engines[0].starts <= 4


async def test_a_first_start_that_fails_ends_all_with_its_reason(kept: Keep, model: Path) -> None:
    (model / "no-weights-1").touch()
    _, client, ends = await kept(worked=False, ready=False)
    await soon(client.died.wait())
    assert client.dead and client.dead.endswith("model.safetensors: tensor 'lm_head.weight' is missing")
    assert client.explained and [number for number, _ in ends.given_up] == [0, 1]
    assert ends.exits[0] == (1, CANNOT_START)
