"""How gaps and texts are counted."""

from __future__ import annotations

import pytest

from server.bench.beside.samples import Samples, gaps, timed_ticks
from server.bench.load.endpoints import Outcome


def test_chunks_read_together_count_as_one() -> None:
    assert gaps([1.0, 1.5, 1.5, 1.5, 4.0]) == [0.5, 2.5]
    assert gaps([1.0]) == []


def test_a_request_counts_by_its_share_of_the_window() -> None:
    samples = Samples()
    half_before = Outcome(due=9.0, ended=11.0, inputs=4)
    within = Outcome(due=11.0, ended=12.0, inputs=4)
    longer_than_all = Outcome(due=5.0, ended=25.0, inputs=10)
    outside = Outcome(due=21.0, ended=22.0, inputs=4)
    samples.add_texts([half_before, within, longer_than_all, outside], 10.0, 20.0)
    assert samples.texts == pytest.approx(2 + 4 + 5)
    assert samples.text_seconds == 10.0


def test_samples_of_rounds_are_put_together() -> None:
    every, one = Samples(), Samples(gaps=[1.0], latency=[2.0], texts=3.0, text_seconds=4.0)
    every.add(one)
    every.add(one)
    assert every == Samples(gaps=[1.0, 1.0], latency=[2.0, 2.0], texts=6.0, text_seconds=8.0)


async def test_late_timers_are_noticed() -> None:
    import asyncio
    import time

    lateness: list[float] = []
    async with timed_ticks(lateness):
        await asyncio.sleep(0.01)
        time.sleep(0.1)  # nobody reads meanwhile
        await asyncio.sleep(0.01)
    assert max(lateness) > 0.08
