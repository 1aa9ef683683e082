from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from engine_core.engine_stats import STEP_SECONDS, STEP_TOKENS, Stats
from engine_core.scheduling.planned_step import PlannedStep
from engine_core.scheduling.stats import LandedSteps, StatsFilter
from worker.protocol import StepInput

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


def test_what_begins_is_told_with_its_end_if_that_comes_soon() -> None:
    stats_filter = StatsFilter()
    assert stats_filter.due(lambda: IDLE, 1.0, idle=True) == IDLE
    assert stats_filter.due(lambda: pytest.fail("made too soon"), 5.0, idle=False) is None
    assert stats_filter.due(lambda: replace(IDLE, steps=2), 5.1, idle=True) is not None
    assert stats_filter.due(lambda: pytest.fail("made too soon"), 9.0, idle=False) is None
    assert stats_filter.due(lambda: BUSY, 9.25, idle=False) == BUSY


def test_what_is_not_due_is_not_made() -> None:
    stats_filter = StatsFilter()
    assert stats_filter.due(lambda: BUSY, 1.0, idle=False) == BUSY
    assert stats_filter.due(lambda: pytest.fail("made for nothing"), 1.1, idle=False) is None


def test_steps_are_counted_by_their_time_and_their_rows() -> None:
    landed = LandedSteps()
    work = [1.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    rows: list[Any] = [object()] * 6
    step = PlannedStep(
        StepInput(1, [], []),
        rows,
        [],
        work,
        False,
        False,
        0.0,
        0.0,
        tokens=9,
        prompts=2,
        texts=1,
        is_decoding=False,
    )
    landed.count(step, 0.004)
    landed.count(step, 99.0)
    seen = landed.buckets
    assert (seen.seconds.counts[STEP_SECONDS.index(0.005)], seen.seconds.counts[-1]) == (1, 1)
    assert seen.seconds.total == pytest.approx(99.004)
    assert seen.tokens.counts[STEP_TOKENS.index(16)] == 2
    totals = seen.decoding.total, seen.prompts.total, seen.texts.total
    assert totals == (6, 4, 2)
