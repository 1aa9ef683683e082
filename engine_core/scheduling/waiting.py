"""The sequences that wait for a slot, by class of work and in the order in which they will get one.

Within a class, priority comes first (under the priority policy), then the order of arrival. The texts of one
call do not all come before those of a later call, though: each call gets its turns, however many texts it
has.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine_core.protocol import Add
from engine_core.scheduling.classes import WorkClass, class_of
from engine_core.scheduling.sequence import Order, Sequence
from worker.protocol import Pooling


class WaitingQueue:
    """The waiting sequences of all classes."""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._queues: dict[WorkClass, list[Sequence]] = {each: [] for each in WorkClass}
        self._arrivals = 0
        self._turns = Turns()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def classes(self) -> set[WorkClass]:
        """The classes in which a sequence waits."""
        return {each for each, queue in self._queues.items() if queue}

    def order_of(self, client: int, request: Add) -> Order:
        """The place of a new request among all others."""
        self._arrivals += 1
        pools = isinstance(request.params, Pooling)
        turn = self._turns.take((client, request.group), len(request.tokens)) if pools else 0.0
        rank = request.priority if self._by_priority else class_of(request) == WorkClass.BACKGROUND
        return (int(rank), turn, self._arrivals)

    def first(self, work_class: WorkClass) -> Sequence | None:
        queue = self._queues[work_class]
        return queue[0] if queue else None

    def best(self) -> Sequence | None:
        """The first of all classes in order."""
        firsts = [queue[0] for queue in self._queues.values() if queue]
        return min(firsts, key=order) if firsts else None

    def add(self, seq: Sequence) -> None:
        insort(self._queues[seq.work_class], seq, key=order)

    def remove(self, seq: Sequence) -> None:
        remove(self._queues[seq.work_class], seq)

    def admit(self, seq: Sequence) -> None:
        """Take out a sequence whose turn has come."""
        self.remove(seq)
        if seq.pools:
            self._turns.serve(seq.order[1], seq.prompt_len)


class Turns:
    """Start times in a fair order: each call's next text comes after as many tokens as its last one had."""

    _MANY = 1024

    def __init__(self) -> None:
        self.now = 0.0
        self._next: dict[tuple[int, int], float] = {}

    def take(self, call: tuple[int, int], tokens: int) -> float:
        """The turn of a call's next text; a call without a number has no other one."""
        if not call[1]:
            return self.now
        turn = max(self.now, self._next.get(call, 0.0))
        self._next[call] = turn + tokens
        if len(self._next) > self._MANY:
            self._next = {each: at for each, at in self._next.items() if at > self.now}
        return turn

    def serve(self, turn: float, tokens: int) -> None:
        """Move on by the part of these tokens that is each call's, so that new calls do not always come
        first."""
        waiting = sum(at > self.now for at in self._next.values())
        self.now = max(self.now, turn) + tokens / max(1, waiting)


def order(seq: Sequence) -> Order:
    return seq.order


def remove(ordered: list[Sequence], seq: Sequence) -> None:
    """Take a sequence out of a list that is in order."""
    del ordered[bisect_left(ordered, seq.order, key=order)]
