"""The steps in flight of an engine that shares experts: it takes part in those that others have planned.

While a step of this engine is in flight, it follows no other: when that has landed, its rows can be in the
next one. So the steps that it follows come before its own.
"""

from __future__ import annotations

import time
from collections import deque

from engine_core.executor import StepFuture
from engine_core.ranks.joint_executor import JointExecutor
from engine_core.scheduling.planned_step import PlannedStep
from engine_core.steps_in_flight import StepsInFlight
from worker.host.progress_page import StepProgress
from worker.protocol import StepInput, StepOutput


class JointSteps(StepsInFlight):
    def __init__(self, executor: JointExecutor, progress: StepProgress, depth: int) -> None:
        super().__init__(executor, progress, depth)
        self._joint = executor
        self._followed: deque[StepFuture] = deque()
        """The steps in which it takes part without rows, the oldest first."""

    @property
    def is_busy(self) -> bool:
        return bool(self.steps or self._followed) or self._joint.is_behind

    @property
    def has_room(self) -> bool:
        return len(self.steps) + len(self._followed) < self._depth

    @property
    def waits(self) -> bool:
        return not self._followed[0].done() if self._followed else super().waits

    def receive(self) -> None:
        self._joint.receive()
        super().receive()
        while self._followed and self._followed[0].done():
            self._land_followed()

    def submit(self, planned: PlannedStep, step: StepInput, seconds: float) -> None:
        self._progress.begin(step.number, planned.tokens, max(seconds, self._joint.slowest))
        self.steps.append((planned, self._joint.submit(step, seconds)))

    def follow(self) -> None:
        while not self.steps and self._joint.is_behind and self.has_room:
            self._progress.begin(0, 0, self._joint.slowest)
            self._followed.append(self._joint.follow())

    def take(self) -> tuple[PlannedStep, StepOutput | Exception, float]:
        while self._followed:
            self._land_followed()
        return super().take()

    def _land_followed(self) -> None:
        try:
            self._followed.popleft().result()
        finally:
            self._progress.end()

    @property
    def first_leaves(self) -> bool:
        """Whether the first of the engines wants to end, if that is another one."""
        return self._joint.first_leaves

    def leave(self, until: float, *, busy: bool) -> bool:
        return (not busy and self._joint.leave()) or time.monotonic() > until
