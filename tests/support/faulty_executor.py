"""An executor whose steps fail, or end their engine, when they hold rows that a test names."""

import random
from collections.abc import Callable

from fake_worker import FakeExecutor, FakeWorker, Landed

from worker.config import WorkerConfig
from worker.protocol import NewSeq, SeqStep, StepInput
from worker.worker_facts import WorkerFacts

Fault = Callable[[NewSeq, SeqStep], bool]
"""Whether a row of this sequence makes its step fail."""


class EngineKilled(Exception):
    """The end of an engine's process while it computes a step."""


class FaultyExecutor(FakeExecutor):
    """Fails steps with certain rows, before they are computed or after that."""

    def __init__(
        self,
        config: WorkerConfig,
        report: Callable[[str, float], None],
        limits: WorkerFacts | None = None,
    ) -> None:
        super().__init__(config, report)
        if limits is not None:
            self._worker = FakeWorker(limits)
        self.fault: Fault = lambda entered, row: False
        self.kills: Fault = lambda entered, row: False
        """Whether a row ends the engine."""
        self.most_tokens = 1 << 30
        """Larger steps fail for want of memory."""
        self.random = random.Random(0)
        self.failed: list[int] = []
        """The rows of each step that failed."""
        self.steps = 0
        self._entered: dict[int, NewSeq] = {}

    def submit(self, step: StepInput) -> Landed:
        self.steps += 1
        self._entered |= {new.slot: new for new in step.new}
        if any(self.kills(self._entered[row.slot], row) for row in step.seqs):
            raise EngineKilled
        error: Exception | None = None
        if sum(row.count for row in step.seqs) > self.most_tokens:
            error = MemoryError()
        elif any(self.fault(self._entered[row.slot], row) for row in step.seqs):
            error = RuntimeError("a fault of this test")
        if error is not None:
            self.failed.append(len(step.seqs))
        if error is not None and self.random.random() < 0.5:
            self._worker.failed = True
            return Landed(error)
        try:
            landed = self._worker.launch(step)
        except (ValueError, IndexError, KeyError) as consequence:
            return Landed(consequence)
        self._worker.failed = error is not None
        return landed if error is None else Landed(error)


def prompt_of(entered: NewSeq) -> list[int]:
    return entered.tokens[: entered.prompt_len]
