from __future__ import annotations

from functools import partial

import pytest
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
        if stats_filter.due(partial(replace, BUSY, steps=now), now / 1000, idle=False)
    ]
    assert told == [0, 250, 500, 750]


def test_becoming_idle_is_told_at_once_and_once() -> None:
    stats_filter = StatsFilter()
    assert stats_filter.due(lambda: BUSY, 1.0, idle=False) == BUSY
    assert stats_filter.due(lambda: replace(BUSY, steps=2), 1.01, idle=False) is None
    assert stats_filter.due(lambda: IDLE, 1.02, idle=True) == IDLE
    assert stats_filter.due(lambda: IDLE, 9.0, idle=True) is None


def test_what_is_not_due_is_not_made() -> None:
    stats_filter = StatsFilter()
    assert stats_filter.due(lambda: BUSY, 1.0, idle=False) == BUSY
    assert stats_filter.due(lambda: pytest.fail("made for nothing"), 1.1, idle=False) is None
