"""Tests that run by turns: each has its day, and those that are not marked run every day."""

from pathlib import Path

import pytest
import turns
from turns import TURN_OF_SLOW, Mark, waiting_on

Tests = dict[str, Mark | None]

CASES: Tests = {f"a.py::test_cards[{card}]": ("turns", ()) for card in (80, 89, 90)}
PARTS: Tests = {f"a.py::test_models[{number}]": ("turns", (4,)) for number in range(18)}
OTHER_PARTS: Tests = {f"a.py::test_the_same_models[{number}]": ("turns", (8,)) for number in range(18)}
ALONE: Tests = {"a.py::test_alone": ("turns", (3,))}
SLOW: Tests = {f"a.py::test_slow_{number}": ("slow", ()) for number in range(40)}
THIRDS: Tests = {f"b.py::test_{number}": ("slow", (3,)) for number in range(7)}
OTHERS: Tests = {"a.py::test_quick": None, "a.py::test_quick[1]": None}
OF_A_PLACE: Tests = {
    f"tests/room/c.py::test_{each}": None for each in ("x[1]", "x[2]", "x[3]", "y[1]", "y[2]", "y[3]", "z")
}
OF_A_FILE: Tests = {"tests/room/daily.py::test_x": None}
ALL = {**CASES, **PARTS, **OTHER_PARTS, **ALONE, **SLOW, **THIRDS, **OTHERS, **OF_A_PLACE, **OF_A_FILE}
PLACES = [*turns.PARTS]
DAYS = range(20_000, 20_000 + TURN_OF_SLOW)


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(turns, "PARTS", {"room": 4, "room/daily.py": 1, "roo": 9})


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
        assert running(day) >= OTHERS.keys() | OF_A_FILE.keys()


def test_of_a_place_each_case_runs_with_all_its_tests_on_one_day_of_so_many() -> None:
    parts = [{name.partition("test_")[2] for name in running(day) & OF_A_PLACE.keys()} for day in DAYS[:4]]
    assert sorted(map(sorted, parts)) == [["x[1]", "y[1]"], ["x[2]", "y[2]"], ["x[3]", "y[3]"], ["z"]]


def test_tests_of_a_file_have_the_same_cases_on_the_same_days() -> None:
    for day in DAYS:
        one, other = (
            {name.partition("[")[2] for name in running(day) & each.keys()} for each in (PARTS, OTHER_PARTS)
        )
        assert other <= one


def test_a_test_without_cases_runs_on_one_day_of_so_many() -> None:
    assert sum(running(day) >= ALONE.keys() for day in range(20_000, 20_009)) == 3


def test_every_place_is_there() -> None:
    assert [place for place in PLACES if not (Path(__file__).parent / place).exists()] == []
