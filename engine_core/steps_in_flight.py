"""The steps that an engine has given to its executor and that have not landed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from engine_core.executor import Executor, ExecutorDead, StepFuture
from engine_core.scheduling.planned_step import PlannedStep
from worker.host.progress_page import StepProgress
from worker.protocol import StepInput, StepOutput

_SHORT = 0.01
"""The most seconds of a step that the engine's own thread runs, which reads no message meanwhile."""


class StepsInFlight:
    """Keeps the steps of an executor in their order, and shows a supervisor how the oldest one goes on."""

    first_leaves = False
    """Whether another engine ends, with which this one has to end."""

    def __init__(
        self,
        executor: Executor,
        progress: StepProgress,
        depth: int,
        submit_here: Callable[[StepInput], StepFuture | None] = lambda _: None,
    ) -> None:
        """`depth`: the most steps in flight. `submit_here` runs one in the calling thread, or gives None."""
        self._submit_here = submit_here
        self._executor, self._progress, self._depth = executor, progress, depth
        self.steps: deque[tuple[PlannedStep, StepFuture]] = deque()
        """The steps that this engine has planned, the oldest first."""

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight, or has to be begun though none is planned here."""
        return bool(self.steps)

    @property
    def has_room(self) -> bool:
        """Whether another step may be in flight."""
        return len(self.steps) < self._depth

    @property
    def waits(self) -> bool:
        """Whether a step is in flight, and the oldest one is not done."""
        return bool(self.steps) and not self.steps[0][1].done()

    def receive(self) -> None:
        """Read what the executor has to tell. Raises ExecutorDead if no step can run any more."""
        self._executor.check()

    def submit(self, planned: PlannedStep, step: StepInput, seconds: float) -> None:
        """Have a planned step run, which usually ends within so many seconds."""
        self._progress.begin(step.number, planned.tokens, seconds)
        future = None
        has_texts_alone = planned.texts == len(planned.seqs)  # so nothing can be planned behind it
        if has_texts_alone and not self.steps and seconds < _SHORT:
            future = self._submit_here(step)
        self.steps.append((planned, future or self._executor.submit(step)))

    def follow(self) -> None:
        """Take part in steps of other engines, as none is planned here. An engine alone has nothing to do."""

    def take(self) -> tuple[PlannedStep, StepOutput | Exception, float]:
        """Wait for the oldest step -> what was planned, what it brings or why it failed, and its seconds.

        Raises ExecutorDead.
        """
        planned, future = self.steps.popleft()
        try:
            outcome = future.result()
        except ExecutorDead:
            raise
        except Exception as error:
            outcome = error
        finally:
            seconds = time.monotonic() - self._progress.since
            self._progress.end()
        return planned, outcome, seconds

    def leave(self, until: float, *, busy: bool) -> bool:
        """Whether an engine that drains may end, which may still be busy; others are awaited `until` then."""
        return not busy
