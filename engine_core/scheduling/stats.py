"""The engine's running totals, and when its statistics are sent."""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.protocol import Stats

_INTERVAL = 0.25  # seconds: a gauge read by people and by scrapers needs no more


@dataclass(slots=True)
class Counters:
    """Running totals since the start."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_tokens: int = 0
    busy: float = 0.0


class StatsFilter:
    """Lets statistics through when they have changed and the last ones were sent a while ago.

    The moment in which the engine becomes idle is sent at once, because nothing would be sent after it.
    """

    def __init__(self) -> None:
        self._last: Stats | None = None
        self._sent = 0.0

    def due(self, stats: Stats, now: float) -> Stats | None:
        """The statistics if they are to be sent now, else None."""
        if stats == self._last:
            return None
        idle = not stats.running and not stats.waiting
        if self._last is not None and not idle and now - self._sent < _INTERVAL:
            return None
        self._last, self._sent = stats, now
        return stats
