"""Figures of both sides, and the ratios between them."""

from __future__ import annotations

import pytest

from server.bench.beside.samples import Samples
from server.bench.beside.summary import Ratio, Round, figures, ratios, together

PERCENTS = (50, 99)


def round_of(alone_gap: float, beside_gap: float, alone_texts: float, beside_texts: float) -> Round:
    return Round(
        figures(Samples(gaps=[alone_gap], texts=alone_texts, text_seconds=1.0), PERCENTS),
        figures(Samples(gaps=[beside_gap], texts=beside_texts, text_seconds=1.0), PERCENTS),
    )


def test_ratios_are_taken_within_rounds() -> None:
    found = ratios([round_of(1, 2, 10, 5), round_of(10, 40, 10, 6), round_of(1, 3, 100, 10)])
    assert found["gaps p99"] == Ratio(3.0, 2.0, 4.0)
    assert found["texts/s"] == Ratio(0.5, 0.1, 0.6)


def test_a_figure_of_one_side_alone_has_no_ratio() -> None:
    with_prompt = figures(Samples(gaps=[1.0], prompt_ttft=[1.0]), PERCENTS)
    found = ratios([Round(figures(Samples(gaps=[1.0]), PERCENTS), with_prompt)])
    assert found.keys() == {"gaps median", "gaps p99", "gaps max"}
    assert with_prompt.texts_per_second is None


def test_figures_of_all_rounds_are_made_of_all_samples() -> None:
    sides = [
        Samples(gaps=[0.001], texts=10.0, text_seconds=1.0),
        Samples(gaps=[0.003], texts=0, text_seconds=4),
    ]
    found = together(sides, PERCENTS)
    assert found.gaps is not None
    assert (found.gaps.median, found.gaps.most) == (pytest.approx(2.0), pytest.approx(3.0))
    assert found.texts_per_second == 2.0
