"""The requests that must begin, or end, by some time, and what becomes of those that do not.

A request that is too late costs nothing more: it is ended as an aborted one is. One that cannot be in time,
as far as the engine's pace tells, is refused when it comes.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from engine_core.protocol import Failed
from engine_core.reason_codes import DEADLINE
from engine_core.scheduling.pace import Pace
from engine_core.scheduling.sequence import Sequence

_MOST_ENDED = 256
"""Sequences that have ended and are kept nevertheless, beside as many as have not."""


class Deadlines:
    def __init__(self) -> None:
        self._times: list[tuple[float, int, Sequence]] = []
        """When to look at each sequence again, the next one first."""
        self._count = 0

    @property
    def next(self) -> float | None:
        """The time at which a sequence may have to be ended, if there is one."""
        return self._times[0][0] if self._times else None

    def enter(self, seq: Sequence, now: float, pace: Pace) -> Failed | None:
        """Watch a sequence that has come, or return why it will be too late, as far as can be told."""
        begins, ends = _limits(seq)
        if now >= ends:
            return late(seq)
        if seq.expected is not None:
            first = seq.arrived + seq.expected
            if first - seq.backlog > begins or first + pace.least_seconds(seq) > ends:
                return _refused(seq)
        for at in (begins, ends) if begins < ends < _NEVER else (min(begins, ends),):
            self._count += 1
            heappush(self._times, (at, self._count, seq))
        return None

    def pop_overdue(self, now: float, live: int) -> list[Sequence]:
        """The sequences that must be ended now; `live` is how many there are in all."""
        overdue: dict[Sequence, None] = {}  # one may be here twice, because of its begin and its end
        while self._times and self._times[0][0] <= now:
            _, _, seq = heappop(self._times)
            begins, ends = _limits(seq)
            if not seq.done and (now >= ends or (seq.started is None and now >= begins)):
                overdue[seq] = None
        if len(self._times) > 2 * live + _MOST_ENDED:
            self._times = [one for one in self._times if not one[2].done]
            heapify(self._times)
        return list(overdue)


_NEVER = float("inf")


def _limits(seq: Sequence) -> tuple[float, float]:
    """The times by which a sequence must have begun and ended."""
    request = seq.request
    begins = seq.arrived + request.wait if request.wait and not seq.resumed else _NEVER
    return begins, seq.arrived + request.budget if request.budget else _NEVER


def late(seq: Sequence) -> Failed:
    if seq.started is None:
        return Failed(seq.key[1], 503, "the request has waited for longer than it may", DEADLINE)
    return Failed(seq.key[1], 504, "the request has taken longer than it may", DEADLINE)


def _refused(seq: Sequence) -> Failed:
    message = "the request would take longer than it may, as fast as the engine is now"
    return Failed(seq.key[1], 503, message, DEADLINE)
