"""What an engine counts, and how often it tells."""

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


class Reporter:
    """Lets a Stats through when it is news: something changed, and the last one is a while ago.

    The moment in which the engine becomes idle is told at once, because nothing would be told after it.
    """

    def __init__(self) -> None:
        self._last: Stats | None = None
        self._told = 0.0

    def news(self, stats: Stats, now: float) -> Stats | None:
        if stats == self._last:
            return None
        idle = not stats.running and not stats.waiting
        if self._last is not None and not idle and now - self._told < _INTERVAL:
            return None
        self._last, self._told = stats, now
        return stats
