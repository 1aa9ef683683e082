"""An engine whose ranks have no tensors, and that shares experts with others: a module to run as a process.

Its ranks write the tokens of all replicas in each step into a file of the checkpoint's folder.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from fake_worker import KILLS_PROCESS, FakeWorker, Landed, facts

from engine_core import engine_main as engine_process
from engine_core.ranks.rank_groups import LocalRanks
from worker.config import WorkerConfig
from worker.protocol import StepBounds, StepInput


class SharingRank(FakeWorker):
    """A rank that ends when a marked token comes, and says where it is and what it is told."""

    store = None

    def __init__(self, config: WorkerConfig, report: Callable[[str, float], None]) -> None:
        super().__init__(facts(max_num_seqs=4))
        place, self._folder = config.place, Path(config.folder)
        if (self._folder / f"no-weights-{place.replica}").exists():
            raise ValueError("model.safetensors: tensor 'lm_head.weight' is missing")
        generation = place.expert_rendezvous.split("/")[-2]
        self._rounds = (self._folder / f"{generation}-{place.replica}-{place.rank}").open("a", buffering=1)
        (self._folder / f"pid-{place.replica}").write_text(str(os.getpid()))

    def launch(self, step: StepInput, following: Callable[[], StepBounds] | None = None) -> Landed:
        if any(KILLS_PROCESS in new.tokens[: new.prompt_len] for new in step.new):
            os.kill(os.getpid(), signal.SIGKILL)
        print(*step.replica_tokens, file=self._rounds)
        return super().launch(step, following)

    def close(self) -> None:
        self._rounds.close()


def main() -> int:
    """Run the engine, with ranks of this module."""
    defaults = LocalRanks.__init__.__defaults__
    assert defaults is not None
    LocalRanks.__init__.__defaults__ = ("sharing_rank", *defaults[1:])
    return engine_process.main()


if __name__ == "__main__":
    sys.exit(main())
