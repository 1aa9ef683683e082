"""From a step's raw logits to its tokens, in the order that `Sampling` documents.

Only rows that use an option pay for it; a step of greedy rows is one pass over its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from worker.sampling.draw import Draws, draw, plan_draws
from worker.sampling.groups import Grouped, Scan
from worker.sampling.logprobs import Wanted, rank_chosen
from worker.sampling.masks import Masks, plan_masks
from worker.sampling.penalties import Penalties, plan_penalties
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet
from worker.tables.workspace import slice_rows


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step's sampling rows ask for, staged on the device."""

    masks: Masks | None
    penalties: list[Penalties]
    draws: list[Draws]
    logprobs: list[Wanted]


GREEDY = Plan(masks=None, penalties=[], draws=[], logprobs=[])
"""All rows take the likeliest token."""


@dataclass(frozen=True, slots=True)
class Choice:
    told: Tensor  # [2, R] int32: tokens, and whether they count
    logprobs: list[Tensor]  # one table for each of Plan.logprobs

    @property
    def tokens(self) -> Tensor:  # [R]
        return self.told[0]

    @property
    def finite(self) -> Tensor:
        """[R] 0 where the logits give no answer; the token is then arbitrary."""
        return self.told[1]


def plan_sampling(packet: Packet, slots: Slots, rows: SampleRows, vocab_size: int) -> Plan:
    return Plan(
        masks=plan_masks(packet, slots, rows, vocab_size),
        penalties=plan_penalties(packet, slots, rows),
        draws=plan_draws(packet, slots, rows, vocab_size),
        logprobs=_plan_logprobs(packet, slots, rows, vocab_size),
    )


def _plan_logprobs(packet: Packet, slots: Slots, rows: SampleRows, vocab_size: int) -> list[Wanted]:
    groups: dict[int, list[int]] = {}
    for row in np.flatnonzero(slots.logprobs[rows.slots]):
        top = slots.params[rows.slots[row]].logprobs
        if top is not None:
            groups.setdefault(top, []).append(int(row))
    size = slice_rows(vocab_size)
    return [
        Wanted(packet.ints(members[first : first + size]), members[first : first + size], top)
        for top, members in groups.items()
        for first in range(0, len(members), size)
    ]


def choose(logits: Tensor, plan: Plan, tokens: Tensor, scan: Scan, *, may_sync: bool) -> Choice:
    """`logits` [R, V] float32 are used up; `tokens` is the device's table of all texts so far."""
    logits = logits.contiguous()
    raw = [logits[wanted.rows] for wanted in plan.logprobs]  # copies, before anything is masked
    if plan.masks is not None:
        plan.masks.apply(logits, tokens)
    for penalties in plan.penalties:
        penalties.apply(logits, tokens)
    grouped = Grouped(logits, scan)
    chosen = grouped.told[0]  # [R]
    for draws in plan.draws:
        chosen[draws.rows] = draw(grouped, draws, may_sync=may_sync).int()
    return Choice(
        told=grouped.told,
        logprobs=[
            rank_chosen(each, chosen[wanted.rows].long(), wanted.top)
            for each, wanted in zip(raw, plan.logprobs, strict=True)
        ],
    )
