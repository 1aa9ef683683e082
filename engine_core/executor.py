"""The one door to the torch world: what an engine asks of its workers, and the worker that runs inline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from worker.config import WorkerConfig
from worker.protocol import DEVICE_LOST, StepInput, StepOutput, WorkerFacts
from worker.start import start

if TYPE_CHECKING:
    from worker.runner import Runner


class Report(Protocol):
    """Told the stage of loading, its fraction and, for people, what more there is to say; from any thread."""

    def __call__(self, stage: str, fraction: float, detail: str = "") -> None: ...


class ExecutorDead(OSError):
    """No step can run any more. Like any error of the system, it explains itself."""


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

    @property
    def sentinels(self) -> Sequence[int]:
        """Descriptors to watch while no step is awaited: if one becomes readable, `check`."""
        ...

    def check(self) -> None:
        """Raises ExecutorDead if no step can run any more."""
        ...


MakeExecutor = Callable[[WorkerConfig, Report], Executor]


class InlineExecutor:
    """The worker in a thread of the engine's process.

    Torch lets go of the interpreter while it computes, so the engine plans and tells meanwhile.
    """

    sentinels: Sequence[int] = ()

    def __init__(self, config: WorkerConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._runner: Runner | None = None

    def start(self) -> WorkerFacts:
        """Loads the model. Nothing before this imports torch."""
        self._runner = self._thread.submit(start, self._config, self._report).result()
        return self._runner.facts

    def submit(self, step: StepInput) -> Pending:
        if self._runner is None:
            raise ExecutorDead("the worker is not started")
        return _InlineStep(self._thread.submit(self._runner.launch, step))

    def stop(self) -> None:
        if self._runner is not None:
            self._thread.submit(self._runner.close)
        self._thread.shutdown()

    def check(self) -> None:
        """It lives as long as this process does."""


class _InlineStep:
    def __init__(self, launched: Future[Pending]) -> None:
        self._launched = launched

    def result(self) -> StepOutput:
        try:
            return self._launched.result().result()
        except Exception as error:
            if type(error).__name__ == DEVICE_LOST:
                raise ExecutorDead(f"the device failed: {error}") from error
            raise
