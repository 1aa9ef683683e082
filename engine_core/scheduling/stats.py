"""The engine's running totals, and when its statistics are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_core.protocol import Stats
from engine_core.rates import Rates

_INTERVAL = 0.25  # seconds: a gauge read by people and by scrapers needs no more


@dataclass(slots=True)
class Counters:
    """Running totals since the start."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_tokens: int = 0

    def stats(
        self,
        *,
        running: int,
        waiting: int,
        kv_usage: float,
        busy: float,
        expected_wait: float,
        rates: Rates,
    ) -> Stats:
        """The message that tells these totals and gauges."""
        return Stats(
            running=running,
            waiting=waiting,
            kv_usage=kv_usage,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            preemptions=self.preemptions,
            steps=self.steps,
            step_tokens=self.step_tokens,
            busy=busy,
            expected_wait=expected_wait,
            rates=rates,
        )


class StatsFilter:
    """Lets statistics through when they have changed and the last ones were sent a while ago.

    The moment in which the engine becomes idle is sent at once, because nothing would be sent after it.
    """

    def __init__(self) -> None:
        self._last: Stats | None = None
        self._sent = 0.0

    def due(self, make: Callable[[], Stats], now: float, *, idle: bool) -> Stats | None:
        """The statistics if they are to be sent now, else None. They are made only if they may be due."""
        if self._last is not None and not idle and now - self._sent < _INTERVAL:
            return None
        stats = make()
        if stats == self._last:
            return None
        self._last, self._sent = stats, now
        return stats
