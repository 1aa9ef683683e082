"""One timer for the deadlines of all connections of a process."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

TICK = 0.25
"""Seconds between two looks; a deadline is noticed at most two of them late."""
MOST_AT_ONCE = 100
"""How many deadlines are acted on before other events get their turn."""
LATE = 1.0
"""Seconds by which a look may be late. After more, the loop stood still, and what clients sent meanwhile has
not been read yet."""

NEVER = math.inf


class Waiter(Protocol):
    """Something that has at most one deadline. Both numbers belong to `Deadlines`."""

    due: float
    slot: int | None
    """The tick at which it is looked at, no later than its deadline; None if it is not."""

    def expire(self) -> None:
        """Acts on the deadline, which has passed."""
        ...


class Deadlines:
    """Calls `expire` of each waiter whose deadline has passed.

    Moving a deadline to a later time costs two assignments, because the waiter stays in its slot and is put
    into a later one when its slot comes. There is no timer while nobody waits.
    """

    def __init__(
        self, clock: Callable[[], float], call_later: Callable[[float, Callable[[], None]], object]
    ) -> None:
        """`clock` and `call_later` are those of the event loop."""
        self._clock = clock
        self._call_later = call_later
        self._slots: dict[int, set[Waiter]] = {}
        self._next = 0
        """The first slot that has not been looked at."""
        self._expected: float | None = None
        """The time of the next look; None while nobody waits."""
        self._was_late = False
        self._expired: deque[Waiter] = deque()

    def set(self, waiter: Waiter, seconds: float) -> None:
        """Gives a waiter this deadline in place of the one that it has."""
        due = waiter.due = self._clock() + seconds
        slot = int(due / TICK) + 1
        if waiter.slot is None or slot < waiter.slot:
            self.forget(waiter)
            waiter.due = due
            self._put(waiter, slot)

    def clear(self, waiter: Waiter) -> None:
        """Takes a waiter's deadline away."""
        waiter.due = NEVER

    def forget(self, waiter: Waiter) -> None:
        """Takes a waiter's deadline away, and keeps no reference to it."""
        waiter.due = NEVER
        if waiter.slot is not None:
            self._slots[waiter.slot].discard(waiter)
            waiter.slot = None

    def __len__(self) -> int:
        """The number of waiters that are in a slot."""
        return sum(len(slot) for slot in self._slots.values())

    def _put(self, waiter: Waiter, slot: int) -> None:
        waiter.slot = slot
        self._slots.setdefault(slot, set()).add(waiter)
        if self._expected is None:
            self._next = int(self._clock() / TICK)
            self._look_in(TICK)

    def _look_in(self, seconds: float) -> None:
        self._expected = self._clock() + seconds
        self._call_later(seconds, self._look)

    def _look(self) -> None:
        now = self._clock()
        late = self._expected is not None and now - self._expected > LATE
        if late and not self._was_late:
            self._was_late = True
            self._look_in(TICK)
            return
        self._was_late = False
        self._collect(now)
        for _ in range(min(MOST_AT_ONCE, len(self._expired))):
            waiter = self._expired.popleft()
            if waiter.due <= now:  # it has got no later deadline since
                waiter.due = NEVER
                waiter.expire()
        if self._expired:
            self._look_in(0.0)
        elif any(self._slots.values()):
            self._look_in(TICK)
        else:
            self._slots.clear()
            self._expected = None

    def _collect(self, now: float) -> None:
        """Empties the slots up to now: into `_expired`, or into later slots."""
        this = int(now / TICK)
        for slot in range(self._next, this + 1):
            for waiter in self._slots.pop(slot, ()):
                waiter.slot = None
                if waiter.due <= now:
                    self._expired.append(waiter)
                elif waiter.due != NEVER:
                    self._put(waiter, int(waiter.due / TICK) + 1)
        self._next = this + 1
