"""A choice of ranks for the copies of a layer's experts, so that measured load is spread evenly.

It is the published algorithm that DeepSeek named EPLB, on plain lists: experts with much load get copies, and
copies are packed onto ranks, the heaviest first. Groups of experts stay on one machine where that is
possible. The same loads always give the same map, so that every rank may compute it.
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


def balance(loads: Sequence[float], places: int, *, ranks: int, nodes: int = 1, groups: int = 1) -> ExpertMap:
    """The map of a layer for these loads of its experts.

    `nodes` are machines with equally many of the ranks. A token chooses experts of few of the `groups` of
    neighbouring experts; if the groups divide by the nodes, the experts of a group, and all their copies, lie
    on one node.
    """
    _check(len(loads), places, ranks, nodes, groups)
    if groups % nodes:
        nodes = groups = 1
    members = len(loads) // groups
    by_group = [sum(loads[group * members : (group + 1) * members]) for group in range(groups)]
    experts: list[int] = []
    numbers: list[int] = []  # of the copy at each place, among those of its expert
    for held in _pack(by_group, nodes):
        here = [group * members + member for group in held for member in range(members)]
        copied = _replicate([loads[expert] for expert in here], places // nodes)
        counts = [copied.count(place) for place in range(len(here))]
        shares = [loads[here[place]] / counts[place] for place in copied]
        for on_rank in _pack(shares, ranks // nodes):
            experts += [here[copied[copy]] for copy in on_rank]
            numbers += [copied[:copy].count(copied[copy]) for copy in on_rank]
    of_expert: list[dict[int, int]] = [{} for _ in loads]
    for place, (expert, number) in enumerate(zip(experts, numbers, strict=True)):
        of_expert[expert][number] = place
    return ExpertMap(tuple(experts), tuple(tuple(of[number] for number in sorted(of)) for of in of_expert))


def improve(
    current: ExpertMap, loads: Sequence[float], *, ranks: int, nodes: int = 1, groups: int = 1
) -> ExpertMap:
    """The balanced map, or the current one where that is no worse: experts are moved for a gain only."""
    found = balance(loads, len(current.experts), ranks=ranks, nodes=nodes, groups=groups)
    gains = found.balancedness(loads, ranks) > current.balancedness(loads, ranks)
    return found if gains else current


def stay(current: ExpertMap, found: ExpertMap, ranks: int) -> ExpertMap:
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


def _check(experts: int, places: int, ranks: int, nodes: int, groups: int) -> None:
    if places < experts:
        raise ValueError(f"{experts} experts need as many places, and there are {places}")
    for count, of, what in (
        (places, ranks, "places cannot be divided evenly among ranks"),
        (ranks, nodes, "ranks cannot be divided evenly among nodes"),
        (experts, groups, "experts cannot be divided evenly into groups"),
    ):
        if count % of:
            raise ValueError(f"{what}: {count} by {of}")


def _pack(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Pack things, by their numbers, into packs of equally many.

    The heaviest come first, each into the lightest pack that has room. Of equal ones the first is taken.
    """
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
