"""Requests that no replica can take now: they wait until one can, each for a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine_core.client.in_flight import InFlight


class HeldRequests:
    """The requests that wait, in the order in which they came. One timer serves all."""

    def __init__(self, seconds: float, on_overdue: Callable[[list[InFlight]], None]) -> None:
        """Each request is held for so many seconds, or as long as it may take; `on_overdue` gets those for
        which they are over.

        Call this in the event loop that is used.
        """
        self.seconds = seconds
        self._on_overdue = on_overdue
        self._held: dict[int, InFlight] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When the timer is due."""
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, one: InFlight) -> None:
        """Keep a request. One that has been held since it was last sent keeps its deadline."""
        if one.deadline is None:
            seconds = min(self.seconds, one.seconds_left) if one.since else self.seconds
            one.deadline = self._loop.time() + seconds
        self._held[one.id] = one
        if self._timer is not None and one.deadline < self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._set_timer(one.deadline)

    def _set_timer(self, at: float) -> None:
        self._due = at
        self._timer = self._loop.call_at(at, self._expire)

    def drop(self, id: int) -> None:
        self._held.pop(id, None)

    def take_all(self) -> list[InFlight]:
        held, self._held = list(self._held.values()), {}
        return held

    def close(self) -> None:
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        overdue = [one for one in self._held.values() if (one.deadline or now) <= now]
        for one in overdue:
            del self._held[one.id]
        if self._held:
            self._set_timer(min(one.deadline or now for one in self._held.values()))
        self._on_overdue(overdue)
