"""The random draw of a token: temperature, min_p, top_k, top_p, and one draw per row.

A row's logits become masses, exp((logit - largest) / temperature): probabilities but for a factor, the
likeliest token at 1. Every filter is then a floor under the masses: min_p itself, the k-th largest mass, and
the largest floor that leaves the share of all mass that top_p asks for. Tokens that tie with the last one
above the floor pass as well, so the result does not depend on the order in which a device sorts. The draw
walks the masses above the floor in the order of the vocabulary up to a point that is a fixed hash of (seed,
output index), made in `worker/tables/random_bits.py`.

`LazyMass` computes only the groups that are asked for, which are few where filters leave few tokens; to know
which, it reads results in the middle of a step. `FullMass` computes everything once and reads nothing. Both
have the same results: masses are added in groups of 64, and groups in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.sampling.grouped_logits import GROUP, GroupedLogits, in_slices, slice_rows
from worker.tables.random_bits import uniform
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet

SHORTLIST = 64
"""The number of likeliest tokens that nearly always hold the mass that top_p asks for."""
LONGEST = 1024
"""The tokens that are looked at where the shortlist does not hold it; beyond, all masses are searched."""
ONE = 0x3F80_0000
"""The bits of 1.0 in float32."""


@dataclass(frozen=True, slots=True)
class Draws:
    """A slice of a step's rows that are drawn at random."""

    rows: Tensor  # [N]
    temperature: Tensor  # [N, 1]
    top_p: Tensor  # [N, 1]
    top_k: Tensor  # [N, 1] 0 is off
    min_p: Tensor  # [N, 1]
    points: Tensor  # [N, 1] where to draw, in units of 2**-31
    largest_k: int
    has_min_p_or_top_k: bool
    has_top_p: bool
    bounded: bool  # every row with a top_p has a top_k, too


def plan_draws(packet: Packet, slots: Slots, rows: SampleRows, vocab_size: int) -> list[Draws]:
    """One plan for each slice of rows that fits the workspace."""
    chosen = np.flatnonzero(slots.temperature[rows.slots] > 0)
    parts = in_slices(chosen, slice_rows(vocab_size))
    return [plan_draw(packet, slots, rows, part) for part in parts]


def plan_draw(packet: Packet, slots: Slots, rows: SampleRows, chosen: np.ndarray) -> Draws:
    """The draws of these rows [N], all of them with a temperature."""
    held = rows.slots[chosen]
    top_p, top_k, min_p = slots.top_p[held], slots.top_k[held], slots.min_p[held]
    return Draws(
        rows=packet.ints(chosen),
        temperature=packet.floats(slots.temperature[held])[:, None],
        top_p=packet.floats(top_p)[:, None],
        top_k=packet.ints(top_k)[:, None],
        min_p=packet.floats(min_p)[:, None],
        points=packet.ints(uniform(slots.seed[held], rows.output_index[chosen]))[:, None],
        largest_k=int(top_k.max()),
        has_min_p_or_top_k=bool((top_k > 0).any() or (min_p > 0).any()),
        has_top_p=bool((top_p < 1).any()),
        bounded=not bool(((top_p < 1) & (top_k == 0)).any()),
    )


class Mass(Protocol):
    """The masses of N rows [N, V]."""

    def largest(self, count: int) -> Tensor:
        """The `count` largest masses of each row [N, K], falling; all of them if there are not so many."""
        ...

    def sums(self, floor: Tensor | None) -> Tensor:
        """The sum of each group [N, G], without masses under the floor [N, 1]."""
        ...

    def group(self, groups: Tensor) -> Tensor:
        """The masses [N, 64] of one group [N, 1] of each row."""
        ...


class FullMass:
    def __init__(self, logits: GroupedLogits, rows: Tensor, temperature: Tensor) -> None:
        """`rows` [N] of the logits, `temperature` [N, 1] of each."""
        peak = logits.largest[rows].amax(-1, keepdim=True)  # [N, 1]
        self.values = logits.scan.find_mass(logits.logits[rows], peak, temperature)  # [N, V]
        self._groups = self.values.unflatten(1, (-1, GROUP))  # [N, G, 64]

    def largest(self, count: int) -> Tensor:
        return self.values.topk(min(count, self.values.shape[1])).values

    def sums(self, floor: Tensor | None) -> Tensor:
        if floor is None:
            return self._groups.sum(-1)
        return torch.where(self._groups >= floor[:, None], self._groups, 0.0).sum(-1)

    def group(self, groups: Tensor) -> Tensor:
        return self._groups[torch.arange(len(groups), device=groups.device), groups.squeeze(1)]


class LazyMass:
    def __init__(self, logits: GroupedLogits, rows: Tensor, temperature: Tensor) -> None:
        """`rows` [N] of the logits, `temperature` [N, 1] of each."""
        self._logits, self._rows, self._temperature = logits, rows, temperature
        largest = logits.largest[rows]  # [N, G]
        self._peak = largest.amax(-1, keepdim=True)  # [N, 1]
        # [N, G] the largest mass of each group
        self._most = logits.scan.find_mass(largest, self._peak, temperature)

    def largest(self, count: int) -> Tensor:
        groups = self._most.topk(min(count, self._most.shape[1])).indices  # [N, S]
        masses = self._of_groups(_numbers(groups).expand_as(groups).flatten(), groups.flatten())
        masses = masses.view(len(groups), -1)  # [N, S * 64]
        return masses.topk(min(count, masses.shape[1])).values

    def sums(self, floor: Tensor | None) -> Tensor:
        if floor is None:
            of = self._logits
            return of.scan.sum_mass(of.logits, self._rows, self._peak, self._temperature)
        rows, groups = (self._most >= floor).nonzero(as_tuple=True)  # [M] each
        masses = self._of_groups(rows, groups)  # [M, 64]
        sums = self._logits.scan.sum_above(masses, floor[rows])  # [M]
        return torch.zeros_like(self._most).index_put_((rows, groups), sums)

    def group(self, groups: Tensor) -> Tensor:
        return self._of_groups(_numbers(groups).squeeze(1), groups.squeeze(1))

    def select(self, chosen: Tensor) -> LazyMass:
        """The masses of some of these rows."""
        return LazyMass(self._logits, self._rows[chosen], self._temperature[chosen])

    def full(self, chosen: Tensor) -> FullMass:
        """The masses of some of these rows, all computed."""
        return FullMass(self._logits, self._rows[chosen], self._temperature[chosen])

    def _of_groups(self, rows: Tensor, groups: Tensor) -> Tensor:
        """The masses [M, 64] of one group [M] of each of these rows [M]."""
        logits = self._logits.gather(self._rows[rows], groups)
        return self._logits.scan.find_mass(logits, self._peak[rows], self._temperature[rows])


def _numbers(rows: Tensor) -> Tensor:
    """The numbers of these rows [N, 1]: 0, 1, 2 ..."""
    return torch.arange(len(rows), device=rows.device)[:, None]


def draw(logits: GroupedLogits, draws: Draws, *, may_sync: bool) -> Tensor:
    """The drawn tokens [N] int64. The logits stay as they are."""
    kind = LazyMass if may_sync else FullMass
    mass = kind(logits, draws.rows, draws.temperature)
    floor = _floor(mass, draws) if draws.has_min_p_or_top_k or draws.has_top_p else None
    return _pick(mass, floor, draws.points).clamp_(max=logits.vocab_size - 1)


def processed_logits(logits: GroupedLogits, rows: Tensor, draws: Draws | None, chosen: Tensor) -> Tensor:
    """The logits [N, V] of rows over their temperature, -inf where a filter refuses a token.

    Rows that are not drawn stay as they are. Tokens that were `chosen` [N] are never refused: where a device
    draws by sums of its own, the last digit of a floor may be another one.
    """
    processed = logits.logits[rows]
    if draws is not None:
        processed /= draws.temperature
    if draws is not None and (draws.has_min_p_or_top_k or draws.has_top_p):
        mass = FullMass(logits, rows, draws.temperature)
        kept = mass.values >= _floor(mass, draws)
        processed.masked_fill_(~kept.scatter_(1, chosen[:, None], True), -torch.inf)
    return processed[:, : logits.vocab_size]


Draw = Callable[[GroupedLogits, Draws], Tensor]
"""The type of a function that draws: logits, and the rows to draw for -> their tokens [N]."""

draw_lazily: Draw = partial(draw, may_sync=True)
draw_fully: Draw = partial(draw, may_sync=False)


def _floor(mass: Mass, draws: Draws) -> Tensor:
    """The floor [N, 1] under which the filters refuse a token; 0 refuses nothing."""
    listed = draws.has_top_p and (draws.bounded or isinstance(mass, LazyMass))
    top = mass.largest(max(draws.largest_k, SHORTLIST if listed else 0))  # [N, K], falling
    low = draws.min_p
    if draws.largest_k:
        last = top.gather(1, (draws.top_k.long() - 1).clamp(0, top.shape[1] - 1))
        low = torch.maximum(low, torch.where(draws.top_k > 0, last, 0.0))
    if not draws.has_top_p:
        return low
    total = _total(mass, low if draws.has_min_p_or_top_k else None)
    goal = torch.where(draws.top_p < 1, draws.top_p * total, 0.0)
    return torch.maximum(low, torch.where(draws.top_p < 1, _top_p_floor(mass, top, low, goal, draws), 0.0))


def _top_p_floor(mass: Mass, top: Tensor, low: Tensor, goal: Tensor, draws: Draws) -> Tensor:
    """The largest floor that leaves the goal [N, 1].

    Each row's own options and masses decide how it is found, because a list and a search may differ in the
    last digit: rows with a top_k have it in the list that `top` begins with, others in LONGEST masses or all.
    """
    if not draws.bounded and not isinstance(mass, LazyMass):
        searched = _search_floor(mass, low, goal)
        if not draws.largest_k:
            return searched
        listed, _ = _listed_floor(top, low, goal)
        return torch.where(draws.top_k > 0, listed, searched)
    floor, needed = _listed_floor(top, low, goal)
    if not draws.bounded and isinstance(mass, LazyMass):
        missed = _rows((needed >= min(top.shape[1], LONGEST)) & (draws.top_k == 0))
        if len(missed):
            floor[missed] = _longer_floor(mass.select(missed), low[missed], goal[missed])
    return floor


def _listed_floor(top: Tensor, low: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The largest floor among these masses [N, K] that leaves the goal, and how many are larger; [N, 1] each.

    If the masses do not hold that much, all K are said to be larger.
    """
    top = _above(top, low)
    needed = (top.cumsum(-1, dtype=torch.float64) < goal).sum(-1, keepdim=True)
    return top.gather(1, needed.clamp(max=top.shape[1] - 1)), needed


def _longer_floor(mass: LazyMass, low: Tensor, goal: Tensor) -> Tensor:
    """The same floor for rows whose shortlist does not hold the goal."""
    top = mass.largest(LONGEST)
    floor, needed = _listed_floor(top, low, goal)
    missed = _rows(needed >= top.shape[1])
    if len(missed):
        floor[missed] = _search_floor(mass.full(missed), low[missed], goal[missed])
    return floor


def _rows(chosen: Tensor) -> Tensor:
    """The numbers [M] of the rows that are chosen [N, 1]."""
    return chosen.squeeze(1).nonzero().squeeze(1)


def _search_floor(mass: Mass, low: Tensor, goal: Tensor) -> Tensor:
    """The floor by bisection over all float32 from 0 to 1: exact, and much cheaper than a sort."""
    least = torch.zeros(goal.shape, dtype=torch.int32, device=goal.device)  # positive floats are ordered
    most = torch.full_like(least, ONE + 1)  # as their bits are
    for _ in range(ONE.bit_length()):
        middle = (least + most) // 2
        enough = _total(mass, torch.maximum(low, middle.view(torch.float32))) >= goal
        least, most = torch.where(enough, middle, least), torch.where(enough, most, middle)
    return least.view(torch.float32)


def _pick(mass: Mass, floor: Tensor | None, points: Tensor) -> Tensor:
    """The token [N] at which each row's running sum passes its point: first its group, then itself."""
    sums = mass.sums(floor).cumsum(-1, dtype=torch.float64)  # [N, G]
    target = (points.double() + 0.5) * 2.0**-31 * sums[:, -1:]  # [N, 1]
    group = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(group > 0, sums.gather(1, (group - 1).clamp(min=0)), 0.0)
    inside = mass.group(group)  # [N, 64]
    inner = (inside if floor is None else _above(inside, floor)).cumsum(-1, dtype=torch.float64)
    # Rounding must not carry the rest past the group's end, where no token would be left to pick.
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 2.0**-40))
    return group.squeeze(1) * GROUP + (inner <= rest).sum(-1)


def _total(mass: Mass, floor: Tensor | None) -> Tensor:
    return mass.sums(floor).sum(-1, keepdim=True, dtype=torch.float64)  # [N, 1]


def _above(masses: Tensor, floor: Tensor) -> Tensor:
    return torch.where(masses >= floor, masses, 0.0)
