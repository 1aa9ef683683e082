"""Ranks placed by Ray over a cluster of two nodes, both on this machine. Skipped where Ray is missing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_worker import facts, reference
from small_steps import read

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import ExecutorDead
from engine_core.ranks.layout import rank_places
from engine_core.ranks.ranks_executor import RanksExecutor, make_executor
from engine_core.ranks.ray_ranks import RayRanks
from engine_core.resolve_checkpoint import make_worker_config
from models.config import read_config

SUPPORT = Path(__file__).parents[2] / "support"
MEMORY = 80 << 20  # the least that Ray takes for its own store

with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes, with resources for one rank each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", str(SUPPORT), prepend=os.pathsep
        )  # what Ray starts can import what this test can
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray itself proposes in a warning
        nodes = import_module("ray.cluster_utils").Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "object_store_memory": MEMORY,
            },
        )
        nodes.add_node(num_cpus=1, object_store_memory=MEMORY)
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes.address
        nodes.shutdown()


@pytest.fixture
def executor(cluster: str, model: Path) -> Iterator[RanksExecutor]:
    config = EngineConfig(model=str(model), tensor_parallel_size=2)
    places = rank_places(ProcessConfig(engine=config))
    group = RayRanks(config, places, quiet, "fake_rank")
    worker = make_worker_config(config, read_config(model, {}), model)
    executor = RanksExecutor(worker, quiet, places=places, groups=[group], log_level="info")
    yield executor
    executor.stop()


def quiet(stage: str, fraction: float, detail: str = "") -> None:
    pass


@with_ray
def test_steps_reach_both_nodes_of_the_cluster(executor: RanksExecutor, model: Path) -> None:
    assert executor.start() == facts(has_idle_work=True)
    assert executor.submit(read(1, [5, 6])).result().tokens == reference([5, 6], 1)
    for rank in (0, 1):
        place = (model / f"place-{rank}").read_text()
        assert place.startswith(f"tensor {rank}/2 stage 0/1 local 0/2 at ")
    parents = {parent_of(int((model / f"pid-{rank}").read_text())) for rank in (0, 1)}
    assert len(parents) == 2, "each has an actor of its own"


@with_ray
def test_an_actor_that_is_killed_is_named(executor: RanksExecutor, model: Path) -> None:
    executor.start()
    os.kill(parent_of(int((model / "pid-1").read_text())), signal.SIGKILL)
    with pytest.raises(ExecutorDead, match=r"rank 1 \(tensor 1 of 2, .* ended while serving: the connection"):
        while True:
            executor.check()


@with_ray
def test_a_rank_that_dies_while_loading_is_named(executor: RanksExecutor, model: Path) -> None:
    (model / "no-weights").touch()
    with pytest.raises(
        ExecutorDead, match=r"rank 1 .*ended while loading libraries: model.safetensors: tensor"
    ):
        executor.start()


@with_ray
def test_a_cluster_without_room_is_told(
    executor: RanksExecutor, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr("engine_core.ranks.ray_ranks._WAIT_SECONDS", 0.5)
    config = EngineConfig(model=str(model), tensor_parallel_size=4)
    group = RayRanks(config, rank_places(ProcessConfig(engine=config)), quiet)
    with pytest.raises(OSError, match="no room for 4 workers of 1 CPU each"):
        group.start(make_worker_config(config, read_config(model, {}), model), "info")
    group.stop(by_force=True)


def test_without_a_cluster_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(ConnectionError, match="none was found: start one with `ray start --head`"):
        RayRanks(EngineConfig(model=""), [], quiet)


def test_without_ray_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = EngineConfig(model=str(model), distributed_executor_backend="ray", tensor_parallel_size=2)
    make = make_executor(ProcessConfig(engine=config))
    with pytest.raises(ValueError, match=r"ray needs Ray, .*: `pip install .*`facet serve`"):
        make(make_worker_config(config, read_config(model, {}), model), quiet)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
