"""The sequences that wait for a slot, by class of work and in the order in which they will get one.

Within a class, priority comes first (under the priority policy), then the owner for which least was computed
(`shares.py`), then the order of arrival. The texts of one call do not all come before those of a later
call of the same owner, though: each call gets its turns, however many texts it has.

An owner of which as many sequences run as may is held back: the others overtake its waiting ones. Sequences
whose readers do not keep up are paused: they are in no step, and wait for no slot meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter

from engine_core.protocol import AddRequest, Standing
from engine_core.scheduling.feature import Hooks
from engine_core.scheduling.queue.shares import Call, Owner, WorkClass, class_of
from engine_core.scheduling.sequence import Key, Order, Place, Sequence
from worker.protocol import Pooling

_Queues = dict[WorkClass, dict[Owner, list[Sequence]]]

_EARLIER = 1 << 60
"""Subtracted from the arrival of an answer that goes on: its reader comes before those who wait for a first
token."""
_MOST_OWNERS = 64
"""Owners that are looked at to estimate how many sequences come before another one."""

order: Callable[[Sequence], Order] = attrgetter("order")


class WaitingQueue:
    def __init__(self, by_priority: bool, hooks: Hooks) -> None:
        """Sequences that may not be in the step that is planned now are passed over."""
        self._hooks = hooks
        self.promoted: Sequence | None = None
        """A sequence that gets the next slot, because another one was preempted for it."""
        self._by_priority = by_priority
        self._queues: _Queues = {each: {} for each in WorkClass}
        self._held_back: _Queues = {each: {} for each in WorkClass}
        self.count = 0
        """The number of sequences that wait, also for others of their owner."""
        self._arrivals = 0

    @property
    def able(self) -> int:
        """The number of sequences that wait, but for those of owners that are held back."""
        if not self.count:
            return 0
        held_back = [len(queue) for queues in self._held_back.values() for queue in queues.values()]
        return self.count - sum(held_back)

    @property
    def tokens(self) -> int:
        """The tokens that all sequences which wait have to compute before their next answer."""
        if not self.count:
            return 0
        return sum(
            len(seq.tokens) - seq.computed
            for queues in (self._queues, self._held_back)
            for owners in queues.values()
            for queue in owners.values()
            for seq in queue
        )

    def classes(self) -> set[WorkClass]:
        return {each for each, queues in self._queues.items() if queues}

    def order_of(self, client: int, request: AddRequest, owner: Owner) -> Order:
        self._arrivals += 1
        arrival = self._arrivals - (_EARLIER if request.prompt_len else 0)
        pools = isinstance(request.params, Pooling)
        turn = owner.turns.take((client, request.group), len(request.tokens)) if pools else 0.0
        rank = request.priority if self._by_priority else class_of(request) == WorkClass.BACKGROUND
        return (int(rank), turn, arrival)

    @property
    def next_promoted(self) -> Sequence | None:
        """The promoted sequence, if the step has room for it."""
        found = self.promoted
        return found if found is None or self._may_run(found) else None

    def first(self, work_class: WorkClass) -> Sequence | None:
        if (promoted := self.next_promoted) is not None and promoted.work_class is work_class:
            return promoted
        queues = self._queues[work_class]
        if self._hooks.may_run:
            able = [next(filter(self._may_run, queue), None) for queue in queues.values()]
            return min(filter(None, able), key=_rank, default=None)
        heads = [queue[0] for queue in queues.values()]
        return min(heads, key=_rank, default=None) if len(heads) != 1 else heads[0]

    def firsts(self) -> Iterator[Sequence]:
        """The first of each class in which some wait."""
        return filter(None, map(self.first, self._queues))

    def may_start(self, seq: Sequence) -> bool:
        """Whether a sequence waits for a slot, and may be in the step that is planned now."""
        held_back = seq.owner.is_held_back or seq.paused
        return seq.place is Place.WAITING and not held_back and self._may_run(seq)

    def is_diverted(self, seq: Sequence, now: float) -> bool:
        """Whether a feature takes a sequence out of the queue, before it gets a slot."""
        return any(divert(seq, now) for divert in self._hooks.divert)

    def _may_run(self, seq: Sequence) -> bool:
        return all(may_run(seq) for may_run in self._hooks.may_run)

    def add(self, seq: Sequence) -> None:
        if seq.owner.max_running or seq.owner.is_held_back:
            self._settle(seq.owner)  # its limit may be another one since the last request
        queues = self._queues_of(seq)
        insort(queues.setdefault(seq.owner, []), seq, key=order)
        self.count += 1
        if seq.pools:
            seq.owner.turns.enter(_call(seq))

    def remove(self, seq: Sequence) -> None:
        queues = self._queues_of(seq)
        queue = queues[seq.owner]
        remove(queue, seq)
        if not queue:
            del queues[seq.owner]
        self.count -= 1
        if seq is self.promoted:
            self.promoted = None
        if seq.pools:
            seq.owner.turns.leave(_call(seq))

    def standing(self, seq: Sequence) -> Standing:
        """How far a sequence has come, whether it waits or runs."""
        ahead = -1 if seq.place is not Place.WAITING or seq.paused else self._ahead_of(seq)
        return Standing(seq.key[1], ahead, seq.computed, len(seq.tokens))

    def _ahead_of(self, seq: Sequence) -> int:
        """About how many sequences of its class come before it: of other owners as many as weights say."""
        queues = self._queues_of(seq)
        own = bisect_left(queues[seq.owner], seq.order, key=order)
        turns = (own + 1) / seq.owner.weight
        others = [
            min(len(queue), turns * owner.weight)
            for owner, queue in islice(queues.items(), _MOST_OWNERS)
            if owner is not seq.owner
        ]
        scale = (len(queues) - 1) / len(others) if others else 0.0
        return own + int(scale * sum(others))

    def admit(self, seq: Sequence) -> None:
        """Take out a sequence whose turn has come: it gets a slot."""
        if seq.pools:
            seq.owner.turns.advance(seq.order[1], seq.prompt_len)
        self.remove(seq)
        seq.owner.running += 1
        if seq.owner.max_running:
            self._settle(seq.owner)

    def release(self, owner: Owner) -> None:
        owner.running -= 1
        if owner.is_held_back:
            self._settle(owner)

    def _queues_of(self, seq: Sequence) -> dict[Owner, list[Sequence]]:
        return (self._held_back if seq.owner.is_held_back else self._queues)[seq.work_class]

    def _settle(self, owner: Owner) -> None:
        """Hold an owner back if as many of its sequences run as may, or let it have slots again."""
        if owner.is_held_back is owner.is_full:
            return
        owner.is_held_back = owner.is_full
        before, after = self._queues, self._held_back
        if not owner.is_held_back:
            before, after = after, before
        for work_class, queues in before.items():
            if owner in queues:
                after[work_class][owner] = queues.pop(owner)
        if owner.is_held_back and self.promoted is not None and self.promoted.owner is owner:
            self.promoted = None


class PausedSequences(set[Sequence]):
    """The sequences whose answers are not read. They keep slots and blocks, but are preempted first."""

    def __init__(self, live: Mapping[Key, Sequence], waiting: WaitingQueue, hooks: Hooks) -> None:
        """`live` are all sequences of the engine, and `waiting` those that wait for a slot."""
        super().__init__()
        self._live = live
        self._waiting, self._hooks = waiting, hooks
        self.held: dict[Sequence, bool] = {}
        """The sequences that a feature keeps out of steps, and whether each goes on by itself afterwards: its
        reader keeps up."""

    def pause(self, keys: Iterable[Key]) -> None:
        """Leave these out of steps until `resume`, but for those that have ended, or may not stand still."""
        for key in keys:
            seq = self._live.get(key)
            if seq in self.held:
                self.held[seq] = False
            if seq is None or seq.paused or not all(may(seq) for may in self._hooks.may_pause):
                continue
            seq.paused = True
            self.add(seq)
            if seq.place is Place.WAITING:
                self._waiting.remove(seq)

    def resume(self, keys: Iterable[Key]) -> None:
        seqs = [self._live[key] for key in keys if key in self._live]
        self.held.update((seq, True) for seq in seqs if seq in self.held)
        self.take_out(seq for seq in seqs if seq not in self.held)

    def take_out(self, seqs: Iterable[Sequence]) -> None:
        """Let sequences go on, if they were paused."""
        for seq in seqs:
            if seq.paused:
                seq.paused = False
                self.discard(seq)
                if seq.place is Place.WAITING:
                    self._waiting.add(seq)

    def victim(self) -> Sequence | None:
        """The sequence that is preempted next for one that is not paused, if one can be."""
        able = [seq for seq in self if seq.place is Place.RUNNING and not seq.in_flight]
        return max(able, key=order, default=None)


def _rank(seq: Sequence) -> tuple[int, float, float, Order]:
    """The place of the first sequence of an owner among those of others in its class."""
    owner = seq.owner
    return (seq.order[0], owner.used[seq.work_class], owner.running / owner.weight, seq.order)


def used_by_owner(seq: Sequence) -> float:
    return seq.owner.used[seq.work_class]


def comes_before(seq: Sequence, running: Sequence) -> bool:
    """Whether a waiting sequence may use what is left of a step before this running one of the same class."""
    if seq.owner is running.owner or seq.order[0] > running.order[0]:
        return False
    return used_by_owner(seq) <= used_by_owner(running)


def remove(ordered: list[Sequence], seq: Sequence) -> None:
    del ordered[bisect_left(ordered, seq.order, key=order)]


def _call(seq: Sequence) -> Call:
    return seq.key[0], seq.request.group
