"""The executor's interface, which runs an engine's steps, and the executor of a worker in the same process.

Only through it does the engine reach code that needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from worker.config import WorkerConfig
from worker.protocol import DEVICE_LOST, StepInput, StepOutput, WorkerFacts
from worker.start import start

if TYPE_CHECKING:
    from worker.runner import Runner


class ReportPhase(Protocol):
    """A function that is called while a model loads, from any thread, with the phase and its share done.

    `detail` is for people.
    """

    def __call__(self, phase: str, fraction: float, detail: str = "") -> None: ...


class ExecutorDead(OSError):
    """No step can run any more. Its message is for people, like that of any OSError."""


class StepFuture(Protocol):
    """The output of a step, which may not be there yet."""

    def result(self) -> StepOutput:
        """Waits for the output. Raises ExecutorDead, or the error that made this one step fail."""
        ...


class Executor(Protocol):
    """Runs steps in the order in which they are submitted."""

    def start(self) -> WorkerFacts: ...

    def submit(self, step: StepInput) -> StepFuture: ...

    def stop(self) -> None: ...

    @property
    def sentinels(self) -> Sequence[int]:
        """Descriptors to watch while no step is awaited. When one becomes readable, call `check`."""
        ...

    def check(self) -> None:
        """Raises ExecutorDead if no step can run any more."""
        ...


MakeExecutor = Callable[[WorkerConfig, ReportPhase], Executor]


class InlineExecutor:
    """Runs the worker in a thread of the engine's process.

    Torch releases the interpreter's lock while it computes, so the engine plans and sends meanwhile.
    """

    sentinels: Sequence[int] = ()

    def __init__(self, config: WorkerConfig, report: ReportPhase) -> None:
        self._config = config
        self._report = report
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._runner: Runner | None = None

    def start(self) -> WorkerFacts:
        """Loads the model. Nothing before this imports torch."""
        self._runner = self._thread.submit(start, self._config, self._report).result()
        return self._runner.facts

    def submit(self, step: StepInput) -> StepFuture:
        if self._runner is None:
            raise ExecutorDead("the worker is not started")
        return _InlineStep(self._thread.submit(self._runner.launch, step))

    def stop(self) -> None:
        if self._runner is not None:
            self._thread.submit(self._runner.close)
        self._thread.shutdown()

    def check(self) -> None:
        """Does nothing, because the worker lives as long as this process does."""


class _InlineStep:
    def __init__(self, launched: Future[StepFuture]) -> None:
        self._launched = launched

    def result(self) -> StepOutput:
        try:
            return self._launched.result().result()
        except Exception as error:
            if type(error).__name__ == DEVICE_LOST:
                raise ExecutorDead(f"the device failed: {error}") from error
            raise
