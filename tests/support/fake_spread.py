"""An engine process, run as a module, whose worker is two ranks without tensors, each a process."""

import sys

from engine_core import engine_main
from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import ReportPhase
from engine_core.ranks.layout import rank_places
from engine_core.ranks.rank_groups import LocalRanks
from engine_core.ranks.ranks_executor import RanksExecutor
from worker.config import WorkerConfig


def executor(config: WorkerConfig, report: ReportPhase) -> RanksExecutor:
    places = rank_places(ProcessConfig(engine=EngineConfig(model="", tensor_parallel_size=2)))
    groups = [LocalRanks(places, "fake_rank")]
    return RanksExecutor(config, report, places=places, groups=groups, log_level="critical")


if __name__ == "__main__":
    sys.exit(engine_main.main(executor))
