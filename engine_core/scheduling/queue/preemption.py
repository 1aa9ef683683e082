"""Finds the running sequence that gives way to a waiting one, or to another that needs its memory."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered

from engine_core.scheduling.queue.shares import Owners, WorkClass, who_gives_way
from engine_core.scheduling.queue.waiting_queue import WaitingQueue, order
from engine_core.scheduling.sequence import Order, Sequence


class Preemption:
    def __init__(
        self,
        waiting: WaitingQueue,
        owners: Owners,
        preempt: Callable[[Sequence], None],
        *,
        by_priority: bool,
    ) -> None:
        self._waiting = waiting
        self._owners = owners
        self._preempt = preempt
        self._by_priority = by_priority

    def make_room(self, running: Ordered[Sequence], fits: Callable[[Sequence], bool]) -> Sequence | None:
        """Preempt running sequences for waiting ones of higher priority, or of owners that have less.

        A sequence in flight cannot be preempted, as its newest token is not known yet. It is returned, to be
        left out of this step, and can be preempted when its step has landed.
        """
        while running and (victim := self._victim(running, fits)):
            if victim.in_flight:
                return victim
            self._preempt(victim)
        return None

    def _victim(self, running: Ordered[Sequence], fits: Callable[[Sequence], bool]) -> Sequence | None:
        """The sequence of `running`, which is in order, that has to make room for a waiting one, if any."""
        if self._by_priority and (victim := self._for_priority(running, fits)) is not None:
            return victim
        return self._for_share(running, fits) if len(self._owners.active) > 1 else None

    def _for_priority(self, running: Ordered[Sequence], fits: Callable[[Sequence], bool]) -> Sequence | None:
        first, victim = min(self._waiting.firsts(), key=order, default=None), running[-1]
        if first is None or victim.request.priority <= first.request.priority or fits(first):
            return None
        return victim

    def _for_share(self, running: Ordered[Sequence], fits: Callable[[Sequence], bool]) -> Sequence | None:
        """A sequence of an owner that has more than its part of the slots, for another that waits."""
        for first in self._waiting.firsts():
            owner = who_gives_way(first.owner, self._owners.active.values())
            if owner is None or fits(first):
                continue
            same_class = owner.live[first.work_class] > 0
            if same_class and owner.used[first.work_class] < first.owner.used[first.work_class]:
                continue  # it has had less so far, and catches up
            victim = next(seq for seq in reversed(running) if seq.owner is owner)
            if _may_end(victim, first):
                self._waiting.promoted = first
                return victim
        return None

    def for_memory(self, seq: Sequence, running: Ordered[Sequence]) -> Sequence | None:
        """The running sequence whose memory `seq` gets, if one comes after it."""
        several = len(self._owners.active) > 1
        movable = [other for other in running if not other.in_flight]
        if not several:
            return movable[-1] if movable and movable[-1].order > seq.order else None
        victim = max(movable, key=keeping_place, default=None)
        return victim if victim is not None and keeping_place(victim) > keeping_place(seq) else None


def _may_end(victim: Sequence, first: Sequence) -> bool:
    """Whether priorities and classes allow that one gives way to the other."""
    if victim.order[0] < first.order[0]:
        return False
    return first.work_class != WorkClass.BACKGROUND or victim.work_class == WorkClass.BACKGROUND


def keeping_place(seq: Sequence) -> tuple[int, float, Order]:
    """The place of a running sequence in the order in which they keep their memory."""
    return (seq.order[0], seq.owner.running / seq.owner.weight, seq.order)
