"""The time within which nearly all steps of a size end."""

from __future__ import annotations

import random

from engine_core.watch.step_times import StepTimes


def test_it_comes_near_the_99th_percentile() -> None:
    times, draw = StepTimes(), random.Random(1)
    for _ in range(5000):
        times.learn(20, 0.01, draw.uniform(1.0, 2.0))
    assert 1.8 < times.usual(20, 0.01) < 2.5


def test_sizes_do_not_share_it() -> None:
    times = StepTimes()
    for _ in range(100):
        times.learn(1, 0.01, 5.0)
    assert times.usual(1, 0.01) > 4 and times.usual(1000, 0.3) == 0.3


def test_what_is_expected_counts_at_least() -> None:
    times = StepTimes()
    times.learn(1, 0.01, 0.005)
    assert times.usual(1, 2.0) == 2.0


def test_a_step_that_stood_still_teaches_little() -> None:
    times = StepTimes()
    times.learn(1, 0.01, 3600.0)
    assert times.usual(1, 0.01) < 0.012
