"""Graphs that are made by all ranks that share layers, or by none of them.

A captured exchange is replayed by all ranks together. So all must have the same graphs, and a rank that
cannot make one must leave no other waiting for its part of an exchange. Each graph is made in steps:

1. Each rank does the work by itself, without exchanges. Whoever runs short of memory, or has a model that
   cannot be recorded, learns it here, where nobody waits for it.
2. All say on the host how they fared. If one has failed, none goes on.
3. All do the work together: NCCL connects them in the ways that exchanges of these sizes take. Memory is no
   question any more, for the work has just been done. What fails here all the same ends the rank.
4. Each captures. Exchanges are only noted, so again nobody waits, and all say how they fared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

import torch

from worker.kernels.cuda.steps.capture import Capture
from worker.ranks.process_groups import Groups

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class _Outcome(IntEnum):
    """What came of an attempt. Of several ranks the lowest counts."""

    IMPOSSIBLE = 0
    NO_MEMORY = 1
    MADE = 2


@dataclass(frozen=True, slots=True)
class Recording(Generic[Result]):
    result: Result
    """The last replay left its results here."""
    replay: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Missing:
    """A recording that no rank has."""

    short_of_memory: bool
    """Whether memory ran out, and nothing worse, so that a smaller one may succeed."""
    reason: str | None
    """Why it failed on this rank; None if it failed on others only, whose logs say why."""


class Recorder:
    def __init__(self, capture: Capture, groups: Groups) -> None:
        self._capture, self._groups = capture, groups

    def record(self, open_work: Callable[[], Callable[[], Result]]) -> Recording[Result] | Missing:
        """Record the work that `open_work` returns. All ranks record the same, in the same order."""

        def rehearse() -> Callable[[], Result]:
            work = open_work()
            with self._groups.rehearsing():
                self._capture.warm_up(work)
            return work

        work = self._attempt(rehearse)
        if isinstance(work, Missing):
            return work
        if not self._groups.alone:
            self._capture.warm_up(work)
        return self._attempt(lambda: Recording(*self._capture(work)))

    def _attempt(self, attempt: Callable[[], Result]) -> Result | Missing:
        """What `attempt` returns, if it succeeds on all ranks."""
        made, reason, outcome = None, None, _Outcome.MADE
        try:
            made = attempt()
        except Exception as error:  # of the model's own code, too
            logger.debug("a graph cannot be made", exc_info=True)
            reason = str(error)  # the error itself would keep all that was made alive
            outcome = _Outcome.NO_MEMORY if _is_short_of_memory(error) else _Outcome.IMPOSSIBLE
        lowest = self._groups.minimum(int(outcome))
        if made is None or lowest < _Outcome.MADE:
            return Missing(lowest == _Outcome.NO_MEMORY, reason)
        return made


def _is_short_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, and perhaps the end of the capture broke, too."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False
