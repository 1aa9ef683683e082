"""The executor that a configuration asks for, and the groups of ranks that it needs."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from engine_core.config import ProcessConfig
from engine_core.executor import Executor, InlineExecutor, MakeExecutor, ReportPhase
from engine_core.expert_options import check_halves
from engine_core.joint_steps.joint_executor import JointExecutor
from engine_core.joint_steps.step_halves import Halving
from engine_core.ranks.layout import backend_of, rank_places
from engine_core.ranks.local_ranks import LocalRanks
from engine_core.ranks.ranks_executor import RankGroup, RanksExecutor
from engine_core.ranks.ray_ranks import RayRanks
from engine_core.ranks.remote_ranks import RemoteRanks
from engine_core.wire.sockets import ClusterKeys
from worker.config import Place, WorkerConfig
from worker.ranks.unix_sockets import connect_all

_MEETING_SECONDS = 600.0
"""The longest time that an engine which is ready waits for others that share experts with it."""


def make_executor(process: ProcessConfig) -> MakeExecutor:
    """A function that makes the executor of this engine process, once the worker's options are known."""
    backend, shares_experts = backend_of(process), process.expert_replicas > 1
    check_halves(process.engine, process.expert_replicas)
    places = rank_places(process, _expert_rendezvous(process) if shares_experts else "")

    def make(worker: WorkerConfig, report: ReportPhase) -> Executor:
        worker = replace(worker, run_folder=process.folder or "")
        if backend == "uni":
            return InlineExecutor(replace(worker, place=places[0]), report)
        groups = _groups(process, backend, places, report)
        ranks = RanksExecutor(worker, report, places=places, groups=groups, log_level=process.log_level)
        return _in_joint_steps(process, ranks) if shares_experts else ranks

    return make


def _expert_rendezvous(process: ProcessConfig) -> str:
    """The address at which the ranks of all replicas meet that share experts: another one at each start."""
    folder = Path(process.folder or "", f"experts-{process.generation}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return f"file://{folder}/m"  # short, because it begins the paths of sockets


def _in_joint_steps(process: ProcessConfig, ranks: RanksExecutor) -> JointExecutor:
    """The executor of an engine whose ranks compute experts together with those of other engines."""
    prefix, size = f"{process.folder}/joint-{process.generation}", process.expert_replicas
    return JointExecutor(
        ranks,
        process.index,
        lambda: connect_all(prefix, process.index, size, _MEETING_SECONDS),
        Halving.asked_for(process.engine),
    )


def _groups(
    process: ProcessConfig, backend: str, places: list[Place], report: ReportPhase
) -> list[RankGroup]:
    config = process.engine
    if backend == "ray":
        return [RayRanks(config, places, report)]
    per_node = config.ranks // config.nnodes
    local = LocalRanks(places[:per_node], folder=process.folder, progress_page=process.progress_page)
    if config.nnodes == 1:
        return [local]
    keys = ClusterKeys.derive(config.cluster_key or "")
    nodes = {node: places[node * per_node : (node + 1) * per_node] for node in range(1, config.nnodes)}
    # Other machines come first: local ranks that wait for them would not report it.
    return [RemoteRanks(config.master_addr, config.master_port, keys, nodes, report), local]
