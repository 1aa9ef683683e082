"""The random choice: temperature, min_p, top_k, top_p, and one draw per row.

A row's logits become weights, exp((logit - largest) / temperature): probabilities but for a factor, the
likeliest token at 1. Every filter is then a floor under the weights: min_p itself, the k-th largest weight,
and the largest floor that leaves the mass top_p asks for. Tokens that tie with the last one kept are kept
as well, so what is kept does not depend on the order in which a device sorts.

The draw walks the kept weights in the order of the vocabulary up to a point that is a fixed hash of (seed,
output index), computed on the host: no device, batch or rank can change it. The weights themselves, and what
it costs to look at them, are `worker/sampling/mass.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.sampling.groups import GROUP, Grouped
from worker.sampling.mass import AllWeights, FewWeights, Weights
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet
from worker.tables.workspace import slice_rows

SHORTLIST = 64
"""So many of the likeliest tokens nearly always hold the mass that top_p asks for."""
WIDEN = 16
LONGEST = 1024
"""Where they do not, so many times as many are looked at, as long as that is cheaper than a search."""
ONE = 0x3F80_0000
"""The bits of 1.0 in float32."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Some rows of a step that are drawn at random."""

    rows: Tensor  # [N]
    temperature: Tensor  # [N, 1]
    top_p: Tensor  # [N, 1]
    top_k: Tensor  # [N, 1] 0 is off
    min_p: Tensor  # [N, 1]
    points: Tensor  # [N, 1] where to draw, in units of 2**-31
    largest_k: int
    cuts_low: bool  # any min_p or top_k
    cuts_mass: bool  # any top_p
    short: bool  # every row with a top_p has a top_k, too


def uniform(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """31 random bits for each pair: output number `counter` of SplitMix64, started at mix(seed)."""
    stream = mix(seeds.astype(np.uint64))
    steps = counters.astype(np.uint64) + np.uint64(1)
    return (mix(stream + steps * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)).astype(np.int64)


def mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every bit of the input reaches every bit of the output."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def plan_draws(packet: Packet, slots: Slots, rows: SampleRows, vocab_size: int) -> list[Draws]:
    """One plan for each slice of rows that fits the workspace."""
    chosen = np.flatnonzero(slots.temperature[rows.slots] > 0)
    size = slice_rows(vocab_size)
    return [
        _plan_slice(packet, slots, rows, chosen[first : first + size])
        for first in range(0, len(chosen), size)
    ]


def _plan_slice(packet: Packet, slots: Slots, rows: SampleRows, chosen: np.ndarray) -> Draws:
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
        cuts_low=bool((top_k > 0).any() or (min_p > 0).any()),
        cuts_mass=bool((top_p < 1).any()),
        short=not bool(((top_p < 1) & (top_k == 0)).any()),
    )


def draw(logits: Grouped, draws: Draws, *, may_sync: bool) -> Tensor:
    """[N] int64. Leaves the logits as they are."""
    kind = FewWeights if may_sync else AllWeights
    weights = kind(logits, draws.rows, draws.temperature)
    floor = _floor(weights, draws) if draws.cuts_low or draws.cuts_mass else None
    return _pick(weights, floor, draws.points).clamp_(max=logits.vocab_size - 1)


def _floor(weights: Weights, draws: Draws) -> Tensor:
    """[N, 1] under which the filters refuse; 0 refuses nothing."""
    by_mass = draws.cuts_mass and (draws.short or isinstance(weights, FewWeights))
    top = weights.largest(max(draws.largest_k, SHORTLIST if by_mass else 0))  # [N, K], falling
    low = draws.min_p
    if draws.largest_k:
        last = top.gather(1, (draws.top_k.long() - 1).clamp(0, top.shape[1] - 1))
        low = torch.maximum(low, torch.where(draws.top_k > 0, last, 0.0))
    if not draws.cuts_mass:
        return low
    goal = torch.where(draws.top_p < 1, draws.top_p * _mass(weights, low if draws.cuts_low else None), 0.0)
    if draws.short:
        high, _ = _listed_floor(_above(top, low), goal)
    elif isinstance(weights, FewWeights):
        high = _widening_floor(weights, top, low, goal)
    else:
        high = _search_floor(weights, low, goal)
    return torch.maximum(low, torch.where(draws.top_p < 1, high, 0.0))


def _listed_floor(top: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The largest floor that leaves the goal, and whether the weights hold that much; [N, 1] each."""
    needed = (top.cumsum(-1, dtype=torch.float64) < goal).sum(-1, keepdim=True)  # tokens before the last one
    return top.gather(1, needed.clamp(max=top.shape[1] - 1)), needed < top.shape[1]


def _widening_floor(weights: FewWeights, top: Tensor, low: Tensor, goal: Tensor) -> Tensor:
    """Looks at more of the likeliest weights, or at all, for those rows only that need it."""
    floor, found = _listed_floor(_above(top, low), goal)
    missed = (~found).squeeze(1).nonzero().squeeze(1)
    if len(missed):
        wider = WIDEN * top.shape[1]
        if wider > LONGEST:
            floor[missed] = _search_floor(weights.all_of(missed), low[missed], goal[missed])
        else:
            rest = weights.some(missed)
            floor[missed] = _widening_floor(rest, rest.largest(wider), low[missed], goal[missed])
    return floor


def _search_floor(weights: Weights, low: Tensor, goal: Tensor) -> Tensor:
    """The floor by bisection over all float32 from 0 to 1: exact, and much cheaper than a sort."""
    least = torch.zeros(goal.shape, dtype=torch.int32, device=goal.device)  # positive floats are ordered
    most = torch.full_like(least, ONE + 1)  # as their bits are
    for _ in range(ONE.bit_length()):
        middle = (least + most) // 2
        enough = _mass(weights, torch.maximum(low, middle.view(torch.float32))) >= goal
        least, most = torch.where(enough, middle, least), torch.where(enough, most, middle)
    return least.view(torch.float32)


def _pick(weights: Weights, floor: Tensor | None, points: Tensor) -> Tensor:
    """[N] where each row's running sum passes its point: first the group, then the weight in it."""
    sums = weights.sums(floor).cumsum(-1, dtype=torch.float64)  # [N, G]
    target = (points.double() + 0.5) * 2.0**-31 * sums[:, -1:]  # [N, 1]
    group = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(group > 0, sums.gather(1, (group - 1).clamp(min=0)), 0.0)
    inside = weights.group(group)  # [N, 64]
    inner = (inside if floor is None else _above(inside, floor)).cumsum(-1, dtype=torch.float64)
    # Rounding must not carry the rest past the group's end, where no weight would be left to pick.
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 2.0**-40))
    return group.squeeze(1) * GROUP + (inner <= rest).sum(-1)


def _mass(weights: Weights, floor: Tensor | None) -> Tensor:
    return weights.sums(floor).sum(-1, keepdim=True, dtype=torch.float64)  # [N, 1]


def _above(weights: Tensor, floor: Tensor) -> Tensor:
    return torch.where(weights >= floor, weights, 0.0)
