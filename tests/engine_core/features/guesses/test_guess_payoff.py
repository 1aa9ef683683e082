"""How many guesses pay: rates learned by the strength of a match, and times of steps by their rows."""

import random

import pytest
from replayed_texts import small_bf16

from engine_core.features.guesses.guess_payoff import Acceptance, Record, RowTimes
from engine_core.scheduling.step_cost import CostLine

LINE = [(1, 7e-3), (16, 17e-3)]


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
    acceptance, record, rng = Acceptance(), Record(), random.Random(2)
    rate = acceptance.rate(3)
    for _ in range(60):
        record.learn(rate, held=rng.random() < own)
    assert least < acceptance.rate(3, record.odds) < most
    assert acceptance.rate(3) == rate


def test_the_first_times_are_those_of_the_line_and_then_of_the_steps() -> None:
    line = CostLine(LINE)
    times, rng = RowTimes(line, 64), random.Random(3)
    assert times.seconds(4, 0) == pytest.approx(line.step + 4 * (line.single - line.step), rel=0.01)
    for _ in range(600):
        rows = rng.randint(1, 12)
        times.learn(rows, 0, small_bf16(rows) * rng.uniform(0.95, 1.05))
    for rows in range(1, 13):
        assert times.seconds(rows, 0) == pytest.approx(small_bf16(rows), rel=0.05)


def test_more_rows_never_take_less() -> None:
    times, rng = RowTimes(CostLine(LINE), 64), random.Random(4)
    for _ in range(200):
        times.learn(rng.randint(1, 64), 0, rng.uniform(5e-3, 20e-3))
    seconds = [times.seconds(rows, 0) for rows in range(1, 65)]
    assert seconds == sorted(seconds)


def test_positions_that_are_read_are_not_put_down_to_rows() -> None:
    line = CostLine(LINE)
    times = RowTimes(line, 64)
    for _ in range(50):
        times.learn(1, 4000, 7e-3 + line.tokens(0, 4000))
    assert times.seconds(1, 0) == pytest.approx(7e-3, rel=0.02)
    assert times.seconds(1, 4000) > times.seconds(1, 0)


def test_a_step_that_stood_still_changes_little_and_a_slower_machine_all_numbers_of_rows() -> None:
    times = RowTimes(CostLine(LINE), 64)
    for _ in range(100):
        times.learn(1, 0, 7e-3)
        times.learn(5, 0, 7.2e-3)
    times.learn(1, 0, 100.0)
    assert times.seconds(1, 0) < 8e-3
    for _ in range(100):
        times.learn(1, 0, 14e-3)
    assert times.seconds(5, 0) > 1.25 * 7.2e-3
