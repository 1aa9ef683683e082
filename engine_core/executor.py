"""The one door to the torch world: what an engine asks of its workers, and the worker that runs inline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from worker.config import WorkerConfig
from worker.protocol import StepInput, StepOutput, WorkerFacts

if TYPE_CHECKING:
    from worker.runner import Runner

Report = Callable[[str, float], None]
"""Told the stage of loading and its fraction, from any thread."""

_DEVICE_LOST = "AcceleratorError"
"""What torch raises when the device itself has failed: after that, every use of it in this process fails."""


class ExecutorDead(Exception):
    """No step can run any more."""


class Pending(Protocol):
    """A step on its way."""

    def result(self) -> StepOutput:
        """Waits. Raises ExecutorDead, or whatever made this one step fail."""
        ...


class Executor(Protocol):
    """Runs steps in the order in which they are submitted."""

    def start(self) -> WorkerFacts: ...

    def submit(self, step: StepInput) -> Pending: ...

    def stop(self) -> None: ...


class InlineExecutor:
    """The worker in a thread of the engine's process.

    Torch lets go of the interpreter while it computes, so the engine plans and tells meanwhile.
    """

    def __init__(self, config: WorkerConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._runner: Runner | None = None

    def start(self) -> WorkerFacts:
        """Loads the model. Nothing before this imports torch."""
        self._runner = self._thread.submit(_load, self._config, self._report).result()
        return self._runner.facts

    def submit(self, step: StepInput) -> Pending:
        if self._runner is None:
            raise ExecutorDead("the worker is not started")
        return _InlineStep(self._thread.submit(self._runner.launch, step))

    def stop(self) -> None:
        if self._runner is not None:
            self._thread.submit(self._runner.close)
        self._thread.shutdown()


class _InlineStep:
    def __init__(self, launched: Future[Pending]) -> None:
        self._launched = launched

    def result(self) -> StepOutput:
        try:
            return self._launched.result().result()
        except Exception as error:
            if type(error).__name__ == _DEVICE_LOST:
                raise ExecutorDead(f"the device failed: {error}") from error
            raise


def _load(config: WorkerConfig, report: Report) -> Runner:
    from worker.runner import Runner

    return Runner(config, report)
