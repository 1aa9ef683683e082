"""One timer for the deadlines of all connections of a process."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Protocol

TICK = 0.25
"""Seconds between two looks at all deadlines; one is noticed at most two of them late."""
MOST_AT_ONCE = 100
"""How many deadlines are acted on before other events get their turn."""
LATE = 1.0
"""Seconds by which a look may be late. After more, the loop stood still, and what clients sent meanwhile has
not been read yet."""

NEVER = math.inf


class Waiter(Protocol):
    """Something that has at most one deadline."""

    due: float
    """The deadline on the clock of the event loop. The waiter may move it, or take it away with NEVER."""

    def expire(self) -> None:
        """Acts on the deadline, which has passed."""
        ...


class DeadlineTimer:
    """Calls `expire` of each waiter whose deadline has passed. There is no timer while nobody waits.

    Every look is at all of them, which takes about a millisecond for four thousand, and moving a deadline
    is an assignment.
    """

    def __init__(
        self, clock: Callable[[], float], call_later: Callable[[float, Callable[[], None]], object]
    ) -> None:
        """`clock` and `call_later` are those of the event loop."""
        self._clock = clock
        self._call_later = call_later
        self._waiters: set[Waiter] = set()
        self._expected: float | None = None
        """The time of the next look; None while nobody waits."""
        self._was_late = False

    def set(self, waiter: Waiter, seconds: float) -> None:
        """Gives a waiter this deadline in place of the one that it has."""
        waiter.due = self._clock() + seconds
        self._waiters.add(waiter)
        if self._expected is None:
            self._look_in(TICK)

    def forget(self, waiter: Waiter) -> None:
        """Takes a waiter's deadline away, and keeps no reference to it."""
        waiter.due = NEVER
        self._waiters.discard(waiter)

    def __len__(self) -> int:
        """The number of waiters that are looked at."""
        return len(self._waiters)

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
        passed = [waiter for waiter in self._waiters if not now < waiter.due < NEVER]
        for waiter in islice(passed, MOST_AT_ONCE):
            self._waiters.discard(waiter)
            if waiter.due <= now:
                waiter.due = NEVER
                waiter.expire()
        if len(passed) > MOST_AT_ONCE:
            self._look_in(0.0)
        elif self._waiters:
            self._look_in(TICK)
        else:
            self._expected = None
