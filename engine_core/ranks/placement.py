"""The executor that a configuration asks for, and the crews of ranks that it needs."""

from __future__ import annotations

from msgspec.structs import replace

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import Executor, InlineExecutor, MakeExecutor, ReportStage
from engine_core.ranks.executor import RanksExecutor
from engine_core.ranks.layout import backend_of, lay_out
from engine_core.ranks.local import Crew, LocalCrew
from engine_core.ranks.ray import RayCrew
from engine_core.ranks.remote import RemoteCrew
from engine_core.wire.keys import ClusterKeys
from worker.config import Place, WorkerConfig


def make_executor(process: ProcessConfig) -> MakeExecutor:
    """What runs the steps of the engine in this process."""
    config = process.engine
    backend = backend_of(config, process.local_engines)
    replica = None if process.alone else process.index
    places = lay_out(config, process.local_index, process.local_engines, replica)
    if backend == "uni":
        return lambda worker, report: InlineExecutor(replace(worker, place=places[0]), report)

    def make(worker: WorkerConfig, report: ReportStage) -> Executor:
        crews = _crews(process, backend, places, report)
        return RanksExecutor(worker, report, places=places, crews=crews, log_level=process.log_level)

    return make


def _crews(process: ProcessConfig, backend: str, places: list[Place], report: ReportStage) -> list[Crew]:
    config = process.engine
    if backend == "ray":
        return [RayCrew(config, places, report)]
    per_node = config.ranks // config.nnodes
    local, others = LocalCrew(places[:per_node], folder=process.folder), places[per_node:]
    # Those elsewhere come first: the local ranks would wait for them in their own way, and say nothing.
    return [*_elsewhere(config, others, report), local]


def _elsewhere(config: EngineConfig, others: list[Place], report: ReportStage) -> list[Crew]:
    """The ranks of other machines, if there are any."""
    if not others:
        return []
    per_node = config.ranks // config.nnodes
    keys = ClusterKeys.derive(config.cluster_key or "")
    nodes = {
        1 + index: others[index * per_node : (index + 1) * per_node] for index in range(config.nnodes - 1)
    }
    return [RemoteCrew(config.master_addr, config.master_port, keys, nodes, report)]
