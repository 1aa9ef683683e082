"""A rank without tensors. As a module it is a rank's process with FakeWorker in it.

Token ids make it misbehave. Each rank computes everything, so that any of them can answer, and a step that
one missed shows in the text.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from fake_worker import (
    BREAKS_STEP,
    KILLS_PROCESS,
    LOSES_DEVICE,
    FakeWorker,
    Landed,
    facts,
)

from worker import rank_process as process
from worker.config import Place, WorkerConfig
from worker.protocol import StepBounds, StepInput

FELT = "Connection closed by peer"
"""The message of a rank that fails because another one has ended."""


class AcceleratorError(RuntimeError):
    """The error of a failed device, by its name."""


class FakeRank(FakeWorker):
    """A worker that misbehaves at marked tokens; of several ranks the second does, and others then fail."""

    store = None

    def __init__(self, config: WorkerConfig, report: Callable[[str, float], None]) -> None:
        super().__init__(facts(max_num_seqs=config.options.max_num_seqs or 8, has_idle_work=True))
        self._where = config.place
        self._concerned = self._where.rank == min(1, self._where.size - 1)
        self._folder = Path(config.folder)
        self._life = (self._folder / "life").open("w")
        """A file that the rank which is to be lost keeps locked as long as it lives."""
        if self._concerned:
            fcntl.flock(self._life, fcntl.LOCK_EX)
        self._misload()
        for fraction in (0.0, 0.5, 1.0):
            report("weights", fraction)
        report("warmup", 1.0)
        (self._folder / f"place-{self._where.rank}").write_text(describe(self._where))
        (self._folder / f"pid-{self._where.rank}").write_text(str(os.getpid()))

    def launch(self, step: StepInput, following: Callable[[], StepBounds] | None = None) -> Landed:
        for item in step.encode:
            (self._folder / f"item-{self._where.rank}").write_bytes(item.pixels.data)
        marks = {token for new in step.new for token in new.tokens if token >= BREAKS_STEP}
        if not self._concerned and marks:
            fcntl.flock(self._life, fcntl.LOCK_SH)
            raise RuntimeError(FELT)
        if KILLS_PROCESS in marks:
            os.kill(os.getpid(), signal.SIGKILL)
        if LOSES_DEVICE in marks:
            raise AcceleratorError("an illegal memory access was encountered")
        if BREAKS_STEP in marks:
            raise RuntimeError("odd input")
        return super().launch(step, following)

    def prepare(self) -> bool:
        if (self._folder / "cannot-prepare").exists():
            raise RuntimeError("NCCL is broken")
        return super().prepare()

    def close(self) -> None:
        (self._folder / f"closed-{self._where.rank}").touch()

    def _misload(self) -> None:
        """Fail to load, in the way that a file in the checkpoint's folder names."""
        if not self._concerned:
            return
        if (self._folder / "no-weights").exists():
            raise ValueError("model.safetensors: tensor 'lm_head.weight' is missing")
        if (self._folder / "bad-code").exists():
            os._exit(7)
        if (self._folder / "hangs").exists():
            signal.pause()


def describe(place: Place) -> str:
    return (
        f"tensor {place.tensor_rank}/{place.tensor_size} stage {place.stage}/{place.stages} "
        f"local {place.local_rank}/{place.local_ranks} at {place.address}"
    )


if __name__ == "__main__":
    sys.exit(process.main(FakeRank))
