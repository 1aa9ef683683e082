"""A choice of ranks for the copies of a layer's experts, so that measured load is spread evenly.

It is the published algorithm that DeepSeek named EPLB, for the ranks of one machine: experts with much load
get copies, and copies are packed onto ranks, the heaviest first. The same loads always give the same map, so
that every rank may compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertMap:
    """The places of a layer, rank by rank, and the experts whose copies lie there."""

    experts: tuple[int, ...]
    """The expert at each place. Every rank has equally many places."""
    copies: tuple[tuple[int, ...], ...]
    """The places of each expert's copies, in the order in which the copies were given."""

    def loads_of_ranks(self, loads: Sequence[float], ranks: int) -> list[float]:
        """What each rank has to compute, if the copies of an expert share its load evenly."""
        held = len(self.experts) // ranks
        shares = [loads[expert] / len(self.copies[expert]) for expert in self.experts]
        return [sum(shares[rank * held : (rank + 1) * held]) for rank in range(ranks)]

    def balancedness(self, loads: Sequence[float], ranks: int) -> float:
        """The mean load of the ranks by the largest: 1 if all have the same, 1 / ranks if one has all."""
        shares = self.loads_of_ranks(loads, ranks)
        largest = max(shares)
        return sum(shares) / ranks / largest if largest else 1.0


def balance(loads: Sequence[float], places: int, *, ranks: int) -> ExpertMap:
    """The map of a layer for these loads of its experts."""
    if places < len(loads):
        raise ValueError(f"{len(loads)} experts need as many places, and there are {places}")
    if places % ranks:
        raise ValueError(f"places cannot be divided evenly among ranks: {places} by {ranks}")
    copied = _replicate(loads, places)
    shares = [loads[expert] / copied.count(expert) for expert in copied]
    order = [copy for on_rank in _pack(shares, ranks) for copy in on_rank]  # the copy at each place
    copies: list[list[int]] = [[] for _ in loads]
    for place in sorted(range(places), key=order.__getitem__):
        copies[copied[order[place]]].append(place)
    return ExpertMap(tuple(copied[copy] for copy in order), tuple(map(tuple, copies)))


def improve(current: ExpertMap, loads: Sequence[float], *, ranks: int) -> ExpertMap:
    """The balanced map, or the current one where that is no worse: experts are moved for a gain only."""
    found = balance(loads, len(current.experts), ranks=ranks)
    gains = found.balancedness(loads, ranks) > current.balancedness(loads, ranks)
    return found if gains else current


def keep_places(current: ExpertMap, found: ExpertMap, ranks: int) -> ExpertMap:
    """The map `found`, with experts that remain on a rank at their places there, so that fewer are moved."""
    held = len(current.experts) // ranks
    experts = list(current.experts)
    for start in range(0, len(experts), held):
        coming = list(found.experts[start : start + held])
        left: list[int] = []
        for place in range(start, start + held):
            if current.experts[place] in coming:
                coming.remove(current.experts[place])
            else:
                left.append(place)
        for place, expert in zip(left, coming, strict=True):
            experts[place] = expert
    return map_of(experts, len(current.copies))


def map_of(layout: Sequence[int], experts: int) -> ExpertMap:
    """The map that has these of so many experts at its places."""
    copies: list[list[int]] = [[] for _ in range(experts)]
    for place, expert in enumerate(layout):
        copies[expert].append(place)
    return ExpertMap(tuple(layout), tuple(map(tuple, copies)))


def _pack(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Pack things into packs of equally many: the heaviest first, each into the lightest pack with room."""
    room = len(weights) // packs
    if room == 1:
        return [[number] for number in range(packs)]
    packed: list[list[int]] = [[] for _ in range(packs)]
    totals = [0.0] * packs
    for number in sorted(range(len(weights)), key=lambda number: -weights[number]):
        open_packs = (pack for pack in range(packs) if len(packed[pack]) < room)
        lightest = min(open_packs, key=totals.__getitem__)
        packed[lightest].append(number)
        totals[lightest] += weights[number]
    return packed


def _replicate(loads: Sequence[float], places: int) -> list[int]:
    """The expert of each copy: all experts once, and then, one by one, that with the most load for a copy."""
    copied = list(range(len(loads)))
    counts = [1] * len(loads)
    while len(copied) < places:
        most = max(range(len(loads)), key=lambda expert: loads[expert] / counts[expert])
        copied.append(most)
        counts[most] += 1
    return copied
