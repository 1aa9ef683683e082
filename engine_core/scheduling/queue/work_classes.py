"""Classes of work that share the time of steps, by virtual time.

The next token of a text that is being read comes first, in every step. What is left of a step goes to the
class that has had the least time for its weight, so none starves: prompts that wait for a first token, texts
to be pooled, and background work, for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from engine_core.protocol import AddRequest
from worker.protocol import Pooling


class WorkClass(IntEnum):
    FIRST_TOKEN = 0
    POOLING = 1
    BACKGROUND = 2


WEIGHTS = (16, 8, 1)
"""The time that each class gets in proportion, while all of them have work."""


def class_of(request: AddRequest) -> WorkClass:
    """The class of a request. A priority above 0 says that it can wait: lower numbers run first."""
    if request.priority > 0:
        return WorkClass.BACKGROUND
    return WorkClass.POOLING if isinstance(request.params, Pooling) else WorkClass.FIRST_TOKEN


class TimeShares:
    """Says whose turn it is among the classes that have work."""

    def __init__(self) -> None:
        self._spent = [0.0] * len(WEIGHTS)
        self._now = 0.0
        """The time so spent of the class that was served last."""
        self.active: set[WorkClass] = set()
        """The classes that had work in the step before."""

    def begin_step(self, active: set[WorkClass]) -> None:
        """Note which classes have work. One that had none before does not get the time it missed."""
        for each in active - self.active:
            self._spent[each] = max(self._spent[each], self._now)
        self.active = active

    def whose_turn(self, classes: Iterable[WorkClass]) -> WorkClass:
        return min(classes, key=lambda each: (self._spent[each], each))

    def charge(self, work_class: WorkClass, seconds: float) -> None:
        self._now = self._spent[work_class]
        self._spent[work_class] += seconds / WEIGHTS[work_class]
