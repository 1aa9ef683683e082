"""Experts are copied and placed as published, whatever the loads are."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixtures import first_map
from untimed import untimed

from worker.features.experts.balancer import balance, improve, keep_places

LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PLACED = [
    [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
    [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
]
"""The experts at 16 places of 8 ranks for these loads, by the published algorithm."""

SEVERAL = untimed(150)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_published_example(layer: int) -> None:
    found = balance(LOADS[layer], 16, ranks=8)
    assert list(found.experts) == PLACED[layer]
    for expert, places in enumerate(found.copies):
        assert [found.experts[place] for place in places] == [expert] * len(places)


def test_the_first_map_copies_the_first_experts() -> None:
    start = first_map(3, 8)
    assert start.experts == (0, 1, 2, 0, 1, 2, 0, 1)
    assert start.copies == ((0, 3, 6), (1, 4, 7), (2, 5))
    assert start.loads_of_ranks([6, 3, 4], 2) == [2 + 1 + 2 + 2, 1 + 2 + 2 + 1]


def test_a_skewed_load_is_spread() -> None:
    """The last of eight experts on four ranks has most of the load, and gets all copies."""
    loads = [10.0] * 7 + [90.0]
    start = first_map(8, 12)
    assert start.loads_of_ranks(loads, 4) == [5 + 5 + 5, 5 + 10 + 10, 10 + 90 + 5, 5 + 5 + 5]
    found = improve(start, loads, ranks=4)
    assert found == balance(loads, 12, ranks=4)
    assert [len(copies) for copies in found.copies] == [1] * 7 + [5]
    assert found.loads_of_ranks(loads, 4) == [46, 38, 38, 38]
    assert found.balancedness(loads, 4) == pytest.approx(40 / 46)
    assert start.balancedness(loads, 4) == pytest.approx(40 / 105)


def test_nothing_is_moved_without_a_gain() -> None:
    """Copies may be packed worse than they lie: of the heaviest three, two must share a rank."""
    loads, start = [90.0, 10.0, 10.0, 10.0], first_map(4, 6)
    assert start.loads_of_ranks(loads, 2) == [60, 60]
    assert balance(loads, 6, ranks=2).loads_of_ranks(loads, 2) == [70, 50]
    assert improve(start, loads, ranks=2) is start
    assert start.balancedness([0.0] * 4, 2) == 1


@pytest.mark.parametrize(
    ("places", "ranks", "says"),
    [
        (11, 1, "12 experts need as many places, and there are 11"),
        (14, 4, "places cannot be divided evenly among ranks: 14 by 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(places: int, ranks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        balance(LOADS[0], places, ranks=ranks)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[float], int, int]:
    ranks, experts = draw(st.integers(1, 9)), draw(st.integers(1, 24))
    places = -(-experts // ranks) * ranks + ranks * draw(st.integers(0, 3))
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return [float(load) for load in loads], places, ranks


@SEVERAL
@given(layouts())
def test_every_expert_has_its_places(layout: tuple[list[float], int, int]) -> None:
    loads, places, ranks = layout
    found = balance(loads, places, ranks=ranks)
    assert len(found.experts) == places
    assert sorted(place for copies in found.copies for place in copies) == list(range(places))
    for expert, copies in enumerate(found.copies):
        assert copies
        assert all(found.experts[place] == expert for place in copies)
    assert balance(list(loads), places, ranks=ranks) == found


@SEVERAL
@given(layouts())
def test_no_copy_has_less_than_the_one_that_went_without(layout: tuple[list[float], int, int]) -> None:
    """An expert got its last copy because nobody's copies had more load."""
    loads, places, ranks = layout
    found = balance(loads, places, ranks=ranks)
    most = max(load / len(copies) for load, copies in zip(loads, found.copies, strict=True))
    for load, copies in zip(loads, found.copies, strict=True):
        assert len(copies) == 1 or load / (len(copies) - 1) >= most


@SEVERAL
@given(layouts())
def test_what_is_kept_or_taken_is_never_worse(layout: tuple[list[float], int, int]) -> None:
    loads, places, ranks = layout
    start = first_map(len(loads), places)
    found = improve(start, loads, ranks=ranks)
    assert found.balancedness(loads, ranks) >= start.balancedness(loads, ranks)
    assert improve(found, loads, ranks=ranks) == found


@SEVERAL
@given(layouts())
def test_experts_that_remain_on_a_rank_keep_their_places(layout: tuple[list[float], int, int]) -> None:
    loads, places, ranks = layout
    held = places // ranks
    start = first_map(len(loads), places)
    wanted = balance(loads, places, ranks=ranks)
    found = keep_places(start, wanted, ranks)
    assert found.loads_of_ranks(loads, ranks) == pytest.approx(wanted.loads_of_ranks(loads, ranks))
    for rank in range(ranks):
        here = slice(rank * held, (rank + 1) * held)
        before, after = Counter(start.experts[here]), Counter(found.experts[here])
        assert after == Counter(wanted.experts[here])
        pairs = zip(start.experts[here], found.experts[here], strict=True)
        assert sum(old == new for old, new in pairs) == (before & after).total()
