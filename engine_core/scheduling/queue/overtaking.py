"""Lets prompts that are much shorter than the next one come before it, in half of a step.

So they do not wait until all of it is read, and it takes twice as long at most. Prompts of about one length
come one after the other: if they shared steps, all but the last would have their first tokens later.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from engine_core.scheduling.cache.cache_manager import CacheManager, Prefix
from engine_core.scheduling.first_token_forecast import MUCH, FirstTokenForecast
from engine_core.scheduling.planned_step import StepBuilder
from engine_core.scheduling.queue.shares import TimeShares, WorkClass
from engine_core.scheduling.queue.waiting_queue import WaitingQueue
from engine_core.scheduling.sequence import Sequence


class Overtaking:
    def __init__(
        self,
        waiting: WaitingQueue,
        cache: CacheManager,
        waits: FirstTokenForecast,
        shares: TimeShares,
        *,
        go_on: Callable[[Sequence, int, StepBuilder], float],
        admit: Callable[[Sequence, Prefix, StepBuilder, float], float | None],
    ) -> None:
        """`go_on` and `admit` add a row for a running and for a waiting sequence, and return its seconds."""
        self._waiting, self._cache, self._waits, self._shares = waiting, cache, waits, shares
        self._go_on, self._admit = go_on, admit

    def fill(
        self, running: list[Sequence], step: StepBuilder, most_rows: int, now: float, *, may_admit: bool
    ) -> None:
        """Give half of what a step has left to prompts that overtake the next one, if it does not end there.

        `running` are the sequences of their class that are read already; those that get a row are taken out.
        """
        next_one = running[0] if running else self._waiting.first(WorkClass.FIRST_TOKEN)
        if next_one is None or step.full or step.completes(next_one):
            return
        # Whoever came earlier must not wait longer for a slot.
        may_admit = may_admit and self._waiting.count <= len(self._cache.free_slots)
        half = step.set_half_aside()
        for seq in self._much_shorter(next_one):
            if step.full or len(step.rows) >= most_rows:
                break
            cost: float | None = None
            if seq in running:
                running.remove(seq)
                cost = self._go_on(seq, seq.gap, step)
            elif may_admit and self._waiting.may_start(seq) and not self._waiting.is_diverted(seq, now):
                prefix = self._cache.match(seq)
                cost = None if prefix is None else self._admit(seq, prefix, step, now)
            if cost:
                self._shares.charge(WorkClass.FIRST_TOKEN, cost)
        step.return_half(half)

    def _much_shorter(self, seq: Sequence) -> list[Sequence]:
        """The prompts of its owner that have half as many tokens to compute, or fewer, the shortest first.

        None overtakes an answer that goes on, nor what features hold.
        """
        if seq.record.first_token is not None or seq.is_held:
            return []
        most = seq.unread / MUCH
        found = [other for other in self._waits.prompts if other.unread <= most and _may_overtake(other, seq)]
        found.sort(key=attrgetter("unread"))
        return found


def _may_overtake(seq: Sequence, other: Sequence) -> bool:
    alike = (seq.owner, seq.work_class, seq.order[0]) == (other.owner, other.work_class, other.order[0])
    return alike and not seq.is_held
