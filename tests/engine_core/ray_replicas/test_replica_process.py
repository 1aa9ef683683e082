"""Replicas that Ray runs for processes of this machine: in a real cluster, if Ray is there."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio
from ports import free_ports
from sizes import engine_config
from started_engines import collect, soon, text, until
from tiny import tiny_checkpoint

from engine_core.client.client import EngineClient
from engine_core.config import Replicas
from engine_core.engine_children import EngineProcesses, start_engines
from engine_core.restarts import keep_engines
from worker.protocol import Sampling

MEMORY = 80 << 20  # the least that Ray takes for its own store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture
async def placed(model: Path) -> AsyncIterator[tuple[EngineProcesses, EngineClient]]:
    """The processes of two replicas that Ray places, one of which is on this machine, and their client."""
    config = engine_config(model, cpu_threads=1, num_gpu_blocks_override=16, max_model_len=64)
    replicas = Replicas(size=2, here=1, by_ray=True, port=free_ports(2), secret="s" * 32)
    engines = start_engines(config, replicas)
    client = EngineClient(engines.addresses[0], replicas, restart_wait=30.0)
    engines.worked = True
    keeping = asyncio.create_task(keep_engines(engines, client))
    yield engines, client
    engines.leaving = True
    client.close()
    keeping.cancel()
    engines.stop(5)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
async def test_without_ray_the_remedy_is_told(placed: tuple[EngineProcesses, EngineClient]) -> None:
    engines, client = placed
    await soon(until(lambda: client.replicas[0].works and client.replicas[1].given_up))
    assert "--data-parallel-backend ray needs Ray, which is not" in (client.replicas[1].lost or "")
    assert engines.engines[1].starts == 1, "it would be the same again"
    assert text(await collect(client.submit([5, 6], Sampling(max_tokens=4)))), "the other one serves"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray itself proposes in a warning
        options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": MEMORY}
        nodes = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=options)
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield
        nodes.shutdown()


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
async def test_a_replica_whose_actor_is_killed_is_placed_again(
    cluster: None, placed: tuple[EngineProcesses, EngineClient]
) -> None:
    _, client = placed
    await soon(until(lambda: all(each.works for each in client.replicas)))
    alone = [text(await collect(client.submit([5, 6], Sampling(max_tokens=9), replica=n))) for n in (0, 1)]
    assert alone[0] == alone[1]
    (actor,) = _actors()
    os.kill(actor, signal.SIGKILL)
    await soon(until(lambda: not client.replicas[1].works))
    await soon(until(lambda: client.replicas[1].works))
    assert text(await collect(client.submit([5, 6], Sampling(max_tokens=9), replica=1))) == alone[0]


def _actors() -> list[int]:
    found = subprocess.run(["pgrep", "-f", "^ray::ReplicaActor"], capture_output=True, text=True, check=True)
    return [int(line) for line in found.stdout.split()]
