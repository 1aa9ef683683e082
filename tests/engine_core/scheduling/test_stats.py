from __future__ import annotations

from msgspec.structs import replace

from engine_core.protocol import Stats
from engine_core.scheduling.stats import StatsFilter

BUSY = Stats(
    running=1, waiting=0, kv_usage=0.1, prefix_queries=0, prefix_hits=0, preemptions=0, steps=1, step_tokens=1
)
IDLE = replace(BUSY, running=0, kv_usage=0.0)


def test_changes_are_told_four_times_a_second_at_most() -> None:
    stats_filter = StatsFilter()
    told = [
        now
        for now in range(0, 1000, 10)  # milliseconds
        if stats_filter.due(replace(BUSY, steps=now), now / 1000)
    ]
    assert told == [0, 250, 500, 750]


def test_becoming_idle_is_told_at_once_and_once() -> None:
    stats_filter = StatsFilter()
    assert stats_filter.due(BUSY, 1.0) == BUSY
    assert stats_filter.due(replace(BUSY, steps=2), 1.01) is None
    assert stats_filter.due(IDLE, 1.02) == IDLE
    assert stats_filter.due(IDLE, 9.0) is None
