"""Ranks that Ray places on the machines of its cluster, starts and ends.

Each actor is a node with one rank (`node_process.py`), which connects to the engine as any other does.
Neither steps nor tensors go through Ray. Ray is imported when it is asked for, and nowhere but here.
"""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec
from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.executor import ExecutorDead, ReportPhase
from engine_core.ranks.node_process import Node
from engine_core.ranks.rank_groups import RemoteRanks
from engine_core.wire.sockets import ClusterKeys
from worker import logs
from worker.config import Place, WorkerConfig

_FLAG = "--distributed-executor-backend ray"
_WAIT_SECONDS = 120.0  # for a cluster that grows when it is asked for more
_STOP_SECONDS = 2.0


class RankActor:
    """The actor that Ray runs for each rank. Its options are bytes, so that nothing of ours is pickled."""

    def run(self, options: bytes, log_level: str, module: str) -> int:
        config = msgspec.msgpack.decode(options, type=EngineConfig)
        logs.setup(f"node {config.node_rank}", log_level)
        return Node(config, module).run()


class RayRanks(RemoteRanks):
    """The ranks that Ray has started, each a node of its own."""

    def __init__(
        self,
        config: EngineConfig,
        places: Sequence[Place],
        report: ReportPhase,
        module: str = "worker.rank_process",
    ) -> None:
        self._ray, self._ours = connect(_FLAG)
        self._module = module
        self._group: Any = None
        self._actors: list[Any] = []
        self._running: list[Any] = []
        # Ray shows each actor only its own device, as number 0. Which ranks share a machine is not known yet.
        nodes = {place.rank: [replace(place, local_rank=0, local_ranks=1)] for place in places}
        secret, host = secrets.token_hex(32), self._ray.util.get_node_ip_address()
        super().__init__(host, None, ClusterKeys.derive(secret), nodes, report)
        self._config = replace(config, master_addr=host, master_port=self.port, cluster_key=secret)

    def start(self, config: WorkerConfig, log_level: str) -> None:
        self._reserve()
        actor = self._ray.remote(RankActor)
        for rank in self._nodes:
            options = msgspec.msgpack.encode(replace(self._config, node_rank=rank))
            started = actor.options(**self._actor_options(rank)).remote()
            self._actors.append(started)
            self._running.append(started.run.remote(options, log_level, self._module))
        self.gather(self._check)
        self.begin(config, log_level)

    def stop(self, *, by_force: bool) -> None:
        super().stop(by_force=by_force)
        if self._running:
            self._ray.wait(self._running, num_returns=len(self._running), timeout=_STOP_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        if self._ours:
            self._ray.shutdown()

    def _reserve(self) -> None:
        each, count = resources(self._ray, self._config), len(self._nodes)
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
        self._report("import", 0.0, f"waiting for Ray to find room for {count} workers ({wanted} each)")
        self._group = self._ray.util.placement_group([each] * count, strategy="PACK")
        if not self._group.wait(_WAIT_SECONDS):
            raise OSError(
                f"{_FLAG}: the cluster has no room for {count} workers of {wanted} each; `ray status` tells "
                "what it has and what is in use"
            )

    def _actor_options(self, rank: int) -> dict[str, Any]:
        """The options with which Ray starts the actor of a rank in its part of the reservation."""
        each, strategies = resources(self._ray, self._config), import_module("ray.util.scheduling_strategies")
        return {
            "num_cpus": each.get("CPU", 0),
            "num_gpus": each.get("GPU", 0),
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank
            ),
        }

    def _check(self) -> None:
        """Raises ExecutorDead if an actor has ended before it has connected."""
        ended, _ = self._ray.wait(self._running, num_returns=1, timeout=0)
        for reference in ended:
            rank = list(self._nodes)[self._running.index(reference)]
            try:
                why = f"it exited with code {self._ray.get(reference)}"
            except self._ray.exceptions.RayError as error:
                why = " ".join(str(error).split())
            raise ExecutorDead(f"the Ray actor of rank {rank} ended before it had joined: {why}")


def resources(ray: Any, config: EngineConfig, ranks: int = 1) -> dict[str, float]:
    """The resources that so many ranks take of a machine, by Ray's names."""
    asked = config.worker
    gpus = ray.cluster_resources().get("GPU", 0)
    if asked.device == "cuda" or (asked.device == "auto" and gpus):
        return {"GPU": ranks}
    return {"CPU": ranks * (asked.cpu_threads or 1)}


def connect(flag: str) -> tuple[Any, bool]:
    """Ray, for what the flag asks, and whether it was connected here and so has to be left here."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray = import_module("ray")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{flag} needs Ray, which is not installed: `pip install 'ray>=2.50'`, then start with "
            "`facet serve`, because Ray has a `serve` of its own"
        ) from error
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address="auto", logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ConnectionError(
                f"{flag} joins a Ray cluster, and none was found: start one with `ray start --head` here or "
                "`ray start --address <head>` to join another machine's, or set RAY_ADDRESS"
            ) from error
    signal.signal(signal.SIGTERM, handler)  # Ray has set a handler of its own
    return ray, ours
