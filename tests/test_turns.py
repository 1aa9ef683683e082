"""Tests that run by turns: each has its day, and those that are not marked run every day."""

from __future__ import annotations

from turns import TURN_OF_SLOW, Mark, waiting_on

Tests = dict[str, Mark | None]

CASES: Tests = {f"a.py::test_cards[{card}]": ("turns", ()) for card in (80, 89, 90)}
PARTS: Tests = {f"a.py::test_models[{number}]": ("turns", (4,)) for number in range(18)}
OTHER_PARTS: Tests = {f"a.py::test_the_same_models[{number}]": ("turns", (8,)) for number in range(18)}
ALONE: Tests = {"a.py::test_alone": ("turns", (3,))}
SLOW: Tests = {f"a.py::test_slow_{number}": ("slow", ()) for number in range(40)}
THIRDS: Tests = {f"b.py::test_{number}": ("slow", (3,)) for number in range(7)}
OTHERS: Tests = {"a.py::test_quick": None, "a.py::test_quick[1]": None}
ALL = {**CASES, **PARTS, **OTHER_PARTS, **ALONE, **SLOW, **THIRDS, **OTHERS}
DAYS = range(20_000, 20_000 + TURN_OF_SLOW)


def running(day: int) -> set[str]:
    return ALL.keys() - waiting_on(day, ALL.items())


def test_all_have_their_turn_within_two_weeks() -> None:
    assert set().union(*map(running, DAYS)) == ALL.keys()


def test_each_day_has_a_part_of_them() -> None:
    for day in DAYS:
        assert len(running(day) & CASES.keys()) == 1
        assert len(running(day) & PARTS.keys()) in (4, 5)
        assert len(running(day) & SLOW.keys()) in (2, 3)
        assert len(running(day) & THIRDS.keys()) in (2, 3)
        assert running(day) >= OTHERS.keys()


def test_tests_of_a_file_have_the_same_cases_on_the_same_days() -> None:
    for day in DAYS:
        one, other = (
            {name.partition("[")[2] for name in running(day) & each.keys()} for each in (PARTS, OTHER_PARTS)
        )
        assert other <= one


def test_a_test_without_cases_runs_on_one_day_of_so_many() -> None:
    assert sum(running(day) >= ALONE.keys() for day in range(20_000, 20_009)) == 3
