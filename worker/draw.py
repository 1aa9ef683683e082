"""The random choice: temperature, min_p, top_k, top_p, and one draw per row.

A row's logits become weights, exp((logit - largest) / temperature): probabilities but for a factor, the
likeliest token at 1. Every filter is then a floor under the weights: min_p itself, the k-th largest weight,
and the largest floor that leaves the mass top_p asks for. Tokens that tie with the last one kept are kept
as well, so what is kept does not depend on the order in which a device sorts.

The draw walks the kept weights in the order of the vocabulary up to a point that is a fixed hash of (seed,
output index), computed on the host: no device, batch or rank can change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker.limits import slice_rows
from worker.slots import SampleRows, Slots
from worker.staging import Packet

GROUP = 64
"""Weights are added in groups, and groups in float64: exact enough for the widest vocabulary."""
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


def draw(logits: Tensor, draws: Draws, *, reads_at_once: bool) -> Tensor:
    """[N] int64. Reads the logits of its rows, in float32, and leaves them as they are."""
    scaled = logits[draws.rows]  # [N, V]
    scaled = scaled.sub_(scaled.amax(-1, keepdim=True)).div_(draws.temperature)
    weights = functional.pad(scaled.exp_(), (0, -scaled.shape[1] % GROUP))  # [N, V + rest]
    if draws.cuts_low or draws.cuts_mass:
        weights = _cut(weights, draws, reads_at_once)
    return _pick(weights, draws.points).clamp_(max=logits.shape[1] - 1)


def _cut(weights: Tensor, draws: Draws, reads_at_once: bool) -> Tensor:
    """Weights with everything the filters refuse at zero."""
    by_mass = draws.cuts_mass and (draws.short or reads_at_once)
    wanted = max(draws.largest_k, SHORTLIST if by_mass else 0)
    top = weights.topk(min(wanted, weights.shape[1])).values  # [N, K], falling
    if draws.cuts_low:
        floor = draws.min_p
        if draws.largest_k:
            last = top.gather(1, (draws.top_k.long() - 1).clamp(0, top.shape[1] - 1))
            floor = torch.maximum(floor, torch.where(draws.top_k > 0, last, 0.0))
        weights, top = _above(weights, floor), _above(top, floor)
    if draws.cuts_mass:
        weights = _above(weights, _mass_floor(weights, top, draws, reads_at_once))
    return weights


def _mass_floor(weights: Tensor, top: Tensor, draws: Draws, reads_at_once: bool) -> Tensor:
    """[N, 1] the largest floor that leaves a share of top_p; 0 where top_p is off."""
    goal = torch.where(draws.top_p < 1, draws.top_p * _mass(weights), 0.0)
    if draws.short:
        floor, _ = _listed_floor(top, goal)
    elif reads_at_once:
        floor = _widening_floor(weights, top, goal)
    else:
        floor = _search_floor(weights, goal)
    return torch.where(draws.top_p < 1, floor, 0.0)


def _listed_floor(top: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The floor as the likeliest weights show it, and whether they hold the mass at all; [N, 1] each."""
    needed = (top.cumsum(-1, dtype=torch.float64) < goal).sum(-1, keepdim=True)  # tokens before the last one
    return top.gather(1, needed.clamp(max=top.shape[1] - 1)), needed < top.shape[1]


def _widening_floor(weights: Tensor, top: Tensor, goal: Tensor) -> Tensor:
    """Looks at more of the likeliest weights, or at all, for those rows only that need it."""
    floor, found = _listed_floor(top, goal)
    missed = (~found).squeeze(1).nonzero().squeeze(1)
    if len(missed):
        rest, wider = weights[missed], WIDEN * top.shape[1]
        if wider > min(LONGEST, rest.shape[1]):
            floor[missed] = _search_floor(rest, goal[missed])
        else:
            floor[missed] = _widening_floor(rest, rest.topk(wider).values, goal[missed])
    return floor


def _search_floor(weights: Tensor, goal: Tensor) -> Tensor:
    """The floor by bisection over all float32 from 0 to 1: exact, and much cheaper than a sort."""
    bits = weights.view(torch.int32)  # positive floats are ordered as their bits are
    low = torch.zeros(goal.shape, dtype=torch.int32, device=goal.device)
    high = torch.full_like(low, ONE + 1)
    for _ in range(ONE.bit_length()):
        middle = (low + high) // 2
        enough = _mass(torch.where(bits >= middle, weights, 0.0)) >= goal
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.view(torch.float32)


def _pick(weights: Tensor, points: Tensor) -> Tensor:
    """[N] where each row's running sum passes its point: first the group, then the weight in it."""
    groups = weights.unflatten(1, (-1, GROUP))  # [N, G, 64]
    sums = groups.sum(-1).cumsum(-1, dtype=torch.float64)  # [N, G]
    target = (points.double() + 0.5) * 2.0**-31 * sums[:, -1:]  # [N, 1]
    group = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(group > 0, sums.gather(1, (group - 1).clamp(min=0)), 0.0)
    rows = torch.arange(len(weights), device=weights.device)
    inner = groups[rows, group.squeeze(1)].cumsum(-1, dtype=torch.float64)  # [N, 64]
    # Rounding must not carry the rest past the group's end, where no weight would be left to pick.
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 2.0**-40))
    return group.squeeze(1) * GROUP + (inner <= rest).sum(-1)


def _mass(weights: Tensor) -> Tensor:
    return weights.unflatten(1, (-1, GROUP)).sum(-1).sum(-1, keepdim=True, dtype=torch.float64)  # [N, 1]


def _above(weights: Tensor, floor: Tensor) -> Tensor:
    return torch.where(weights >= floor, weights, 0.0)
