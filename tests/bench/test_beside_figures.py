"""How gaps and texts are counted, the figures of both sides, and the ratios between them."""

import pytest
from beside import gaps, timed_ticks
from beside_figures import Ratio, Round, Samples, figures, ratios

from server.bench.endpoints import Outcome


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


async def test_late_timers_are_noticed() -> None:
    import asyncio
    import time

    lateness: list[float] = []
    async with timed_ticks(lateness):
        await asyncio.sleep(0.01)
        time.sleep(0.1)  # nobody reads meanwhile
        await asyncio.sleep(0.01)
    assert max(lateness) > 0.08


PERCENTS = (50, 99)


def round_of(alone_gap: float, beside_gap: float, alone_texts: float, beside_texts: float) -> Round:
    return Round(
        figures([Samples(gaps=[alone_gap], texts=alone_texts, text_seconds=1.0)], PERCENTS),
        figures([Samples(gaps=[beside_gap], texts=beside_texts, text_seconds=1.0)], PERCENTS),
    )


def test_ratios_are_taken_within_rounds() -> None:
    found = ratios([round_of(1, 2, 10, 5), round_of(10, 40, 10, 6), round_of(1, 3, 100, 10)])
    assert found["gaps p99"] == Ratio(3.0, 2.0, 4.0)
    assert found["texts/s"] == Ratio(0.5, 0.1, 0.6)


def test_a_figure_of_one_side_alone_has_no_ratio() -> None:
    with_prompt = figures([Samples(gaps=[1.0], prompt_ttft=[1.0])], PERCENTS)
    found = ratios([Round(figures([Samples(gaps=[1.0])], PERCENTS), with_prompt)])
    assert found.keys() == {"gaps median", "gaps p99", "gaps max"}
    assert with_prompt.texts_per_second is None


def test_figures_of_all_rounds_are_made_of_all_samples() -> None:
    sides = [
        Samples(gaps=[0.001], texts=10.0, text_seconds=1.0),
        Samples(gaps=[0.003], texts=0, text_seconds=4),
    ]
    found = figures(sides, PERCENTS)
    assert found.gaps is not None
    assert (found.gaps.median, found.gaps.most) == (pytest.approx(2.0), pytest.approx(3.0))
    assert found.texts_per_second == 2.0
