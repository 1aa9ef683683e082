"""The executor that a configuration asks for, and the groups of ranks that it needs."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import Executor, InlineExecutor, MakeExecutor, ReportPhase
from engine_core.lockstep.executor import LockstepExecutor
from engine_core.lockstep.halving import Halving, check_halves
from engine_core.ranks.executor import RankGroup, RanksExecutor
from engine_core.ranks.layout import backend_of, rank_places
from engine_core.ranks.local import LocalRanks
from engine_core.ranks.ray import RayRanks
from engine_core.ranks.remote import RemoteRanks
from engine_core.wire.keys import ClusterKeys
from worker.config import Place, WorkerConfig
from worker.ranks.mesh import connect_all

_MEETING_SECONDS = 600.0
"""The longest time that an engine which is ready waits for others that share experts with it."""


def make_executor(process: ProcessConfig) -> MakeExecutor:
    """A function that makes the executor of this engine process, once the worker's options are known."""
    config = process.engine
    backend = backend_of(config, process.local_engines, process.expert_replicas)
    check_halves(config, process.expert_replicas)
    places = rank_places(
        config,
        process.local_index,
        process.local_engines,
        None if process.alone else process.index,
        expert_replicas=process.expert_replicas,
        expert_rendezvous=_expert_rendezvous(process),
    )
    if backend == "uni":
        return lambda worker, report: InlineExecutor(
            replace(worker, place=places[0], run_folder=process.folder or ""), report
        )

    def make(worker: WorkerConfig, report: ReportPhase) -> Executor:
        worker = replace(worker, run_folder=process.folder or "")
        groups = _groups(process, backend, places, report)
        ranks = RanksExecutor(worker, report, places=places, groups=groups, log_level=process.log_level)
        return _in_lockstep(process, ranks) if process.expert_replicas > 1 else ranks

    return make


def _expert_rendezvous(process: ProcessConfig) -> str:
    """The address at which the ranks of all replicas meet that share experts: another one at each start."""
    if process.expert_replicas == 1:
        return ""
    folder = Path(process.folder or "", f"experts-{process.generation}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return f"file://{folder}/m"  # short, because it begins the paths of sockets


def _in_lockstep(process: ProcessConfig, ranks: RanksExecutor) -> LockstepExecutor:
    """The executor of an engine whose ranks compute experts together with those of other engines."""
    prefix = f"{process.folder}/lockstep-{process.generation}"
    size = process.expert_replicas
    return LockstepExecutor(
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
    local, others = _local_ranks(process, places[:per_node]), places[per_node:]
    # Other machines come first: local ranks that wait for them would not report it.
    return [*_remote_ranks(config, others, report), local]


def _local_ranks(process: ProcessConfig, places: list[Place]) -> LocalRanks:
    return LocalRanks(places, folder=process.folder, progress_page=process.progress_page)


def _remote_ranks(config: EngineConfig, others: list[Place], report: ReportPhase) -> list[RankGroup]:
    """The ranks of other machines, if there are any."""
    if not others:
        return []
    per_node = config.ranks // config.nnodes
    keys = ClusterKeys.derive(config.cluster_key or "")
    nodes = {
        1 + index: others[index * per_node : (index + 1) * per_node] for index in range(config.nnodes - 1)
    }
    return [RemoteRanks(config.master_addr, config.master_port, keys, nodes, report)]
