"""Shares of the engine: classes of work share the time of steps, and owners of requests all there is.

The next token of a text that is being read comes first, in every step. What is left of a step goes to the
class that has had the least time for its weight, so none starves: prompts that wait for a first token, texts
to be pooled, and background work, for which nobody waits.

Within a class, owners share by start-time fair queueing over tokens. Each has a count of the tokens that were
computed for it, divided by its weight, and whoever has the lowest count is next. An owner that comes back
begins where the last of the others is: what it did not use while it was away is not saved up for it, and what
it used before is not held against it for longer than others have used less.

Slots are divided too, because a long answer keeps one for thousands of steps: an owner that has more of them
for its weight than another would have with one more gives one up (`who_gives_way`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from engine_core.engine_stats import expected_length
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


Call = tuple[int, int]
"""A client and the number of one of its calls, which is 0 if it has one text only."""

_MOST_IDLE = 4096
"""Owners without requests whose counts are kept."""


class Backlog:
    """The work before the engine, of one owner or of all: uncomputed prompts, and answers that wait."""

    __slots__ = ("_most", "_open", "_sure", "prompts")

    def __init__(self) -> None:
        self.prompts = [0.0] * len(WorkClass)
        """The seconds that the uncomputed prompts of each class will take."""
        self._sure = self._open = self._most = 0

    def add_answer(self, most: int, *, may_stop: bool, sign: int = 1) -> None:
        """Count an answer of so many tokens at most; with the sign -1, count it no more."""
        if may_stop:
            self._open += sign
            self._most += sign * most
        else:
            self._sure += sign * most

    def answers(self, stop_rate: float) -> float:
        """The tokens that the answers will have, if each stops with this chance after each token."""
        if not self._open:
            return float(self._sure)
        return self._sure + self._open * expected_length(self._most / self._open, stop_rate)


class CallTurns:
    """Turns among the calls of one owner, so that a call of thousands of texts does not delay a single text.

    They are start times: each call's next text comes after as many tokens as its last one had.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[Call, float] = {}
        self._waiting: dict[Call, int] = {}

    def take(self, call: Call, tokens: int) -> float:
        turn = max(self._now, self._next.get(call, 0.0))
        if call[1]:
            self._next[call] = turn + tokens
        return turn

    def enter(self, call: Call) -> None:
        self._waiting[call] = self._waiting.get(call, 0) + 1

    def leave(self, call: Call) -> None:
        """Note that a text of this call waits no more. A call of which none waits is forgotten."""
        self._waiting[call] -= 1
        if not self._waiting[call]:
            del self._waiting[call]
            self._next.pop(call, None)

    def advance(self, turn: float, tokens: int) -> None:
        """Move on by each waiting call's part of these tokens, or new calls would always come first."""
        self._now = max(self._now, turn) + tokens / len(self._waiting)


@dataclass(slots=True, eq=False)
class Owner:
    """One owner: what was computed for it, and what it has in the engine."""

    name: str
    every: Owners | None = None
    """All owners, this one among them."""
    weight: float = 1.0
    per_token: float = 1.0
    """What a token adds to `used`."""
    used: list[float] = field(default_factory=lambda: [0.0] * len(WorkClass))
    """The tokens computed for it in each class, divided by its weight."""
    live: list[int] = field(default_factory=lambda: [0] * len(WorkClass))
    running: int = 0
    max_running: int = 0
    """The sequences that may have a slot at a time, if not 0."""
    is_held_back: bool = False
    """Whether those that wait get none now, because as many have one as may."""
    backlog: Backlog = field(default_factory=Backlog)
    turns: CallTurns = field(default_factory=CallTurns)

    @property
    def is_full(self) -> bool:
        return 0 < self.max_running <= self.running

    @property
    def part(self) -> float:
        """Its part of the engine, among all who have requests."""
        return 1.0 if self.every is None or len(self.every.active) < 2 else self.weight / self.every.weights


class Owners:
    """All owners that have requests, and the counts of those that had some lately."""

    def __init__(self) -> None:
        self.active: dict[str, Owner] = {}
        self.weights = 0.0
        self._idle: dict[str, Owner] = {}
        """Owners that had some while others have had some ever since."""
        self._reached = [0.0] * len(WorkClass)
        """The count of each class when nobody had work in it any more."""

    def enter(self, request: AddRequest, work_class: WorkClass) -> Owner:
        """The owner of a new request, which has one sequence more from now on."""
        name, weight = request.owner, request.weight
        if name not in self.active:
            self.active[name] = self._idle.pop(name, None) or Owner(name, self)
            self.weights += self.active[name].weight
        owner = self.active[name]
        if owner.weight != weight:
            self.weights += weight - owner.weight
            owner.weight, owner.per_token = weight, 1 / weight
        owner.max_running = request.max_running
        if not owner.live[work_class]:
            owner.used[work_class] = max(owner.used[work_class], self._lowest(work_class))
        owner.live[work_class] += 1
        return owner

    def leave(self, owner: Owner, work_class: WorkClass) -> None:
        owner.live[work_class] -= 1
        if owner.live[work_class]:
            return
        if not any(owner.live):
            del self.active[owner.name]
            self._idle[owner.name] = owner
            self.weights = self.weights - owner.weight if self.active else 0.0
        if not any(each.live[work_class] for each in self.active.values()):
            counts = [each.used[work_class] for each in (*self.active.values(), *self._idle.values())]
            self._reached[work_class] = max(counts)
        if not self.active:
            self._idle.clear()
        elif len(self._idle) > _MOST_IDLE:
            del self._idle[next(iter(self._idle))]

    def _lowest(self, work_class: WorkClass) -> float:
        counts = [each.used[work_class] for each in self.active.values() if each.live[work_class]]
        return min(counts) if counts else self._reached[work_class]


def who_gives_way(to: Owner, owners: Iterable[Owner]) -> Owner | None:
    """The owner that has most slots for its weight, if it keeps as many as `to` gets with one of them."""
    most = max(owners, key=lambda owner: owner.running / owner.weight, default=None)
    if most is None or most is to or (most.running - 1) / most.weight < (to.running + 1) / to.weight:
        return None
    return most
