"""The requests that must begin, or end, by some time, and what becomes of those that do not.

A request that is too late costs nothing more: it is ended as an aborted one is. One that cannot be in time,
as far as the engine's pace tells, is refused when it comes.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from engine_core.protocol import Failed, OutputsByClient
from engine_core.reason_codes import DEADLINE, TOO_LONG
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_results import put

_MOST_ENDED = 256
"""Sequences that have ended and are kept nevertheless, beside as many as have not."""
_NEVER = float("inf")
_NOT_IN_TIME = "the request would take longer than it may, as fast as the engine is now"


class Deadlines(Feature):
    asked_by = "wait", "budget"

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._times: list[tuple[float, int, Sequence]] = []
        """When to look at each sequence again, the next one first."""
        self._count = 0

    def next_time(self) -> float:
        """Tell the time at which a sequence may have to be ended, if there is one."""
        return self._times[0][0] if self._times else _NEVER

    def forecast(self, seq: Sequence, now: float) -> Failed | None:
        """Watch a sequence that has come, or return why it will be too late, as far as can be told."""
        if not (seq.request.wait or seq.request.budget):
            return None
        begins, ends = _limits(seq)
        if now >= ends:
            return _late(seq)
        if seq.record.expected is not None:
            pace, waits = self._core.pace, self._core.pace.waits.prompts[seq]
            begin = seq.record.arrived + seq.record.expected - waits
            least = waits + pace.least_seconds(seq)
            if begin > begins or begin + least > ends:
                alone = seq.record.arrived + least > ends
                return Failed(seq.key[1], 503, TOO_LONG if alone else _NOT_IN_TIME, DEADLINE)
        for at in (begins, ends) if begins < ends < _NEVER else (min(begins, ends),):
            self._count += 1
            heappush(self._times, (at, self._count, seq))
        self._core.hooks.wake(self)
        return None

    def poll(self, now: float, in_flight: int) -> OutputsByClient:
        """End the requests that have waited, or have taken, longer than they may."""
        outputs: OutputsByClient = {}
        if self._times and self._times[0][0] <= now:
            for seq in self._pop_overdue(now):
                put(outputs, seq, _late(seq))
                self._core.end(seq)
            if not self._times:
                self._core.hooks.rest(self)
        return outputs

    def _pop_overdue(self, now: float) -> list[Sequence]:
        overdue: dict[Sequence, None] = {}  # one may be here twice, because of its begin and its end
        while self._times and self._times[0][0] <= now:
            _, _, seq = heappop(self._times)
            begins, ends = _limits(seq)
            if not seq.done and (now >= ends or (seq.record.started is None and now >= begins)):
                overdue[seq] = None
        if len(self._times) > 2 * len(self._core.live) + _MOST_ENDED:
            self._times = [one for one in self._times if not one[2].done]
            heapify(self._times)
        return list(overdue)


def _limits(seq: Sequence) -> tuple[float, float]:
    """The times by which a sequence must have begun and ended."""
    request = seq.request
    begins = seq.record.arrived + request.wait if request.wait and not seq.resumed else _NEVER
    return begins, seq.record.arrived + request.budget if request.budget else _NEVER


def _late(seq: Sequence) -> Failed:
    if seq.record.started is None:
        return Failed(seq.key[1], 503, "the request has waited for longer than it may", DEADLINE)
    return Failed(seq.key[1], 504, "the request has taken longer than it may", DEADLINE)
