"""Bytes of experts go to their new places, whatever those held before."""

from concurrent.futures import ThreadPoolExecutor

import torch
from drive import ThreadGroup
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from untimed import untimed

from worker.features.experts.moving import choose_sources, move


@st.composite
def rearrangements(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """The experts at all places before and after, and the places of a rank."""
    ranks, held = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    places = ranks * held
    experts = draw(st.integers(1, places))
    number = st.integers(0, experts - 1)
    old = [*range(experts), *draw(st.lists(number, min_size=places - experts, max_size=places - experts))]
    new = [*range(experts), *draw(st.lists(number, min_size=places - experts, max_size=places - experts))]
    return draw(st.permutations(old)), draw(st.permutations(new)), held


def bytes_of(expert: int) -> list[Tensor]:
    """What an expert is made of, in two pieces of different lengths."""
    return [torch.full((3,), expert, dtype=torch.uint8), torch.arange(expert, expert + 5).byte()]


@untimed(60)
@given(rearrangements())
def test_every_place_has_its_new_expert(rearrangement: tuple[list[int], list[int], int]) -> None:
    old, new, held = rearrangement
    ranks = len(old) // held
    memory = [[bytes_of(expert) for expert in old[rank * held :][:held]] for rank in range(ranks)]
    sources = choose_sources(old, new, held)
    assert sources.keys() == {place for place, expert in enumerate(new) if old[place] != expert}
    group = ThreadGroup(ranks)

    def run(rank: int) -> int:
        return move(memory[rank].__getitem__, sources, held, rank, ranks, group.at(rank))

    with ThreadPoolExecutor(ranks) as pool:
        received = list(pool.map(run, range(ranks)))
    assert sum(received) == 8 * len(sources)
    for place, expert in enumerate(new):
        for found, expected in zip(memory[place // held][place % held], bytes_of(expert), strict=True):
            assert torch.equal(found, expected)


def test_a_copy_comes_from_its_own_rank_if_there_is_one() -> None:
    assert choose_sources([0, 1, 2, 0], [0, 0, 2, 1], 2) == {1: 0, 3: 1}
