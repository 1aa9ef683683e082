"""Tests that run by turns: each has its day, and those that are not marked run every day."""

from __future__ import annotations

from turns import WEEK, waiting_on

CASES = {f"a.py::test_cards[{card}]": ["turns"] for card in (80, 89, 90)}
SLOW = {f"a.py::test_slow_{number}": ["slow"] for number in range(40)}
OTHERS = {"a.py::test_quick": [], "a.py::test_quick[1]": ["parametrize"]}
ALL = {**CASES, **SLOW, **OTHERS}


def running(day: int) -> set[str]:
    return ALL.keys() - waiting_on(day, ALL.items())


def test_all_have_their_turn_within_a_week() -> None:
    assert set().union(*map(running, range(20_000, 20_000 + WEEK))) == ALL.keys()


def test_each_day_has_a_part_of_them() -> None:
    for day in range(20_000, 20_000 + WEEK):
        assert len(running(day) & CASES.keys()) == 1
        assert 0 < len(running(day) & SLOW.keys()) < 15
        assert running(day) >= OTHERS.keys()
