"""How often guesses hold: rates learned by the strength of a match, and for each sequence."""

import random

import pytest

from engine_core.features.speculation.speculator import Acceptance, AcceptanceRecord


def test_a_stronger_match_is_believed_more_at_first() -> None:
    acceptance = Acceptance()
    rates = [acceptance.rate(strength) for strength in (1, 2, 4, 8, 16, 24)]
    assert rates == sorted(rates)
    assert 0.1 <= rates[0] < rates[1] < 0.3 < rates[2] < rates[-1] < 1


def test_the_rate_of_each_strength_is_learned() -> None:
    acceptance, rng = Acceptance(), random.Random(1)
    for _ in range(1000):
        acceptance.learn(2, None, held=rng.random() < 0.1)
        acceptance.learn(9, None, held=rng.random() < 0.9)
    assert acceptance.rate(2) == pytest.approx(0.1, abs=0.06)
    assert acceptance.rate(9) == pytest.approx(0.9, abs=0.06)


@pytest.mark.parametrize(("own", "least", "most"), [(0.95, 0.75, 0.98), (0.05, 0.0, 0.2)])
def test_a_sequence_has_a_rate_of_its_own(own: float, least: float, most: float) -> None:
    acceptance, record, rng = Acceptance(), AcceptanceRecord(), random.Random(2)
    rate = acceptance.rate(3)
    for _ in range(60):
        record.learn(rate, held=rng.random() < own)
    assert least < acceptance.rate(3, record.odds) < most
    assert acceptance.rate(3) == rate
