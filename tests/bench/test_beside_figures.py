"""How gaps and texts are counted, the figures of both sides, and the ratios between them."""

import pytest
from beside_figures import Ratio, Round, Samples, figures, ratios

from server.bench.endpoints import Outcome


def test_a_request_counts_by_its_share_of_the_window() -> None:
    samples = Samples()
    half_before = Outcome(due=9.0, ended=11.0, inputs=4)
    within = Outcome(due=11.0, ended=12.0, inputs=4)
    longer_than_all = Outcome(due=5.0, ended=25.0, inputs=10)
    outside = Outcome(due=21.0, ended=22.0, inputs=4)
    samples.add_texts([half_before, within, longer_than_all, outside], 10.0, 20.0)
    assert samples.texts == pytest.approx(2 + 4 + 5)
    assert samples.text_seconds == 10.0


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
