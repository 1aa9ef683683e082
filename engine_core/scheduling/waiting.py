"""The sequences that wait for a slot, by class of work and in the order in which they will get one.

Within a class, priority comes first (under the priority policy), then the order of arrival. The texts of one
call do not all come before those of a later call, though: each call gets its turns, however many texts it
has.
"""

from __future__ import annotations

from bisect import bisect_left, insort

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
        if seq.pools:
            self._turns.enter(_call(seq))

    def remove(self, seq: Sequence) -> None:
        remove(self._queues[seq.work_class], seq)
        if seq.pools:
            self._turns.leave(_call(seq))

    def admit(self, seq: Sequence) -> None:
        """Take out a sequence whose turn has come."""
        if seq.pools:
            self._turns.advance(seq.order[1], seq.prompt_len)
        self.remove(seq)


_Call = tuple[int, int]
"""A client and the number of one of its calls, which is 0 if it has one text only."""


class Turns:
    """Start times in a fair order: each call's next text comes after as many tokens as its last one had."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[_Call, float] = {}
        self._waiting: dict[_Call, int] = {}

    def take(self, call: _Call, tokens: int) -> float:
        """The turn of a call's next text."""
        turn = max(self._now, self._next.get(call, 0.0))
        if call[1]:
            self._next[call] = turn + tokens
        return turn

    def enter(self, call: _Call) -> None:
        """Note that a text of this call waits."""
        self._waiting[call] = self._waiting.get(call, 0) + 1

    def leave(self, call: _Call) -> None:
        """Note that a text of this call waits no more. A call of which none waits is forgotten."""
        self._waiting[call] -= 1
        if not self._waiting[call]:
            del self._waiting[call]
            self._next.pop(call, None)

    def advance(self, turn: float, tokens: int) -> None:
        """Move on by each waiting call's part of these tokens, or new calls would always come first."""
        self._now = max(self._now, turn) + tokens / len(self._waiting)


def order(seq: Sequence) -> Order:
    return seq.order


def remove(ordered: list[Sequence], seq: Sequence) -> None:
    """Take a sequence out of a list that is in order."""
    del ordered[bisect_left(ordered, seq.order, key=order)]


def _call(seq: Sequence) -> _Call:
    return seq.key[0], seq.request.group
