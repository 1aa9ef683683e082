"""Experts are copied and placed as published, whatever the loads are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixtures import first_map
from untimed import untimed

from worker.experts.balance import balance, improve, stay

LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]

SEVERAL = untimed(150)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_published_example(layer: int) -> None:
    found = balance(LOADS[layer], 16, ranks=8, nodes=2, groups=4)
    assert list(found.experts) == PUBLISHED[layer]
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


def test_groups_that_do_not_divide_by_the_nodes_are_placed_freely() -> None:
    assert balance(LOADS[0], 16, ranks=8, nodes=2, groups=3) == balance(LOADS[0], 16, ranks=8)


@pytest.mark.parametrize(
    ("places", "sizes", "says"),
    [
        (11, {"ranks": 1}, "12 experts need as many places, and there are 11"),
        (14, {"ranks": 4}, "places cannot be divided evenly among ranks: 14 by 4"),
        (12, {"ranks": 3, "nodes": 2}, "ranks cannot be divided evenly among nodes: 3 by 2"),
        (12, {"ranks": 2, "groups": 5}, "experts cannot be divided evenly into groups: 12 by 5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(places: int, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        balance(LOADS[0], places, **sizes)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[float], int, dict[str, int]]:
    nodes, ranks_of_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 4))
    ranks = nodes * ranks_of_node
    places = -(-experts // ranks) * ranks + ranks * draw(st.integers(0, 3))
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return [float(load) for load in loads], places, {"ranks": ranks, "nodes": nodes, "groups": groups}


@SEVERAL
@given(layouts())
def test_every_expert_has_its_places(layout: tuple[list[float], int, dict[str, int]]) -> None:
    loads, places, sizes = layout
    found = balance(loads, places, **sizes)
    assert len(found.experts) == places
    assert sorted(place for copies in found.copies for place in copies) == list(range(places))
    for expert, copies in enumerate(found.copies):
        assert copies
        assert all(found.experts[place] == expert for place in copies)
    assert balance(list(loads), places, **sizes) == found


@SEVERAL
@given(layouts())
def test_groups_stay_on_a_node(layout: tuple[list[float], int, dict[str, int]]) -> None:
    loads, places, sizes = layout
    found = balance(loads, places, **sizes)
    members, on_node = len(loads) // sizes["groups"], places // sizes["nodes"]
    for group in range(sizes["groups"]):
        experts = range(group * members, (group + 1) * members)
        assert len({place // on_node for expert in experts for place in found.copies[expert]}) == 1


@SEVERAL
@given(layouts())
def test_no_copy_has_less_than_the_one_that_went_without(
    layout: tuple[list[float], int, dict[str, int]],
) -> None:
    """An expert got its last copy because nobody's copies had more load."""
    loads, places, sizes = layout
    found = balance(loads, places, ranks=sizes["ranks"])
    most = max(load / len(copies) for load, copies in zip(loads, found.copies, strict=True))
    for load, copies in zip(loads, found.copies, strict=True):
        assert len(copies) == 1 or load / (len(copies) - 1) >= most


@SEVERAL
@given(layouts())
def test_what_is_kept_or_taken_is_never_worse(layout: tuple[list[float], int, dict[str, int]]) -> None:
    loads, places, sizes = layout
    start = first_map(len(loads), places)
    found = improve(start, loads, **sizes)
    assert found.balancedness(loads, sizes["ranks"]) >= start.balancedness(loads, sizes["ranks"])
    assert improve(found, loads, **sizes) == found


@SEVERAL
@given(layouts())
def test_experts_that_remain_on_a_rank_keep_their_places(
    layout: tuple[list[float], int, dict[str, int]],
) -> None:
    loads, places, sizes = layout
    ranks, held = sizes["ranks"], places // sizes["ranks"]
    start = first_map(len(loads), places)
    wanted = balance(loads, places, ranks=ranks)
    found = stay(start, wanted, ranks)
    assert found.loads_of_ranks(loads, ranks) == pytest.approx(wanted.loads_of_ranks(loads, ranks))
    for rank in range(ranks):
        here = slice(rank * held, (rank + 1) * held)
        before, after = Counter(start.experts[here]), Counter(found.experts[here])
        assert after == Counter(wanted.experts[here])
        pairs = zip(start.experts[here], found.experts[here], strict=True)
        assert sum(old == new for old, new in pairs) == (before & after).total()
