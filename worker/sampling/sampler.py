"""From logits to tokens, in the order that `Sampling` documents. Only rows that use an option pay for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from worker.sampling.filters import Filter, plan_filters
from worker.sampling.grouped_logits import GroupedLogits, Scan, slice_rows
from worker.sampling.logprobs import LogprobPlan, logprob_table, told_logprobs
from worker.sampling.penalties import Penalties, plan_penalties
from worker.sampling.timestamps import TimestampRules, plan_timestamps
from worker.sampling.token_bias import Masks, plan_masks
from worker.sampling.top_k_top_p import Draw, Draws, plan_draw, plan_draws, processed_logits
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The options of a step's sampling rows, staged on the device."""

    masks: Masks | None
    timestamps: list[TimestampRules]
    penalties: list[Penalties]
    filters: list[Filter]
    draws: list[Draws]
    logprobs: list[LogprobPlan]


@dataclass(frozen=True, slots=True)
class SampleTargets:
    """The rows of a step that sample a token: where their logits come from and where their tokens go."""

    last: Tensor | None  # [R] index of each row's last token in the step; None: they are all its tokens
    flat: Tensor  # [R] flat indices of the new tokens in the table of tokens; none where a recording has them
    rows: Sequence[int]  # index of each row in StepInput.seqs
    plan: SamplingPlan
    bound: dict[int, list[int]]
    """slot -> its rows of the logits, for those whose bounds follow the step: of its token, of each guess."""
    slots: list[int] = field(default_factory=list[int])
    """The slot of each row; none where a recording chooses tokens."""


GREEDY = SamplingPlan(masks=None, timestamps=[], penalties=[], filters=[], draws=[], logprobs=[])
"""All rows take the likeliest token."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    packed: Tensor  # [2, R] int32: tokens, and whether the logits of each are finite
    logprobs: list[Tensor]  # one table for each of SamplingPlan.logprobs
    failed: dict[int, str] = field(default_factory=dict[int, str])
    """Why rows of the logits sample nothing, if some do."""

    @property
    def tokens(self) -> Tensor:  # [R]
        return self.packed[0]

    @property
    def finite(self) -> Tensor:
        """Whether each row's logits are finite [R]; where they are not, its token is arbitrary."""
        return self.packed[1]


def plan_sampling(packet: Packet, slots: Slots, rows: SampleRows, vocab_size: int) -> SamplingPlan:
    return SamplingPlan(
        masks=plan_masks(packet, slots, rows, vocab_size),
        timestamps=list(plan_timestamps(packet, slots, rows)),
        penalties=plan_penalties(packet, slots, rows),
        filters=plan_filters(slots, rows),
        draws=plan_draws(packet, slots, rows, vocab_size),
        logprobs=_plan_logprobs(packet, slots, rows, vocab_size),
    )


def _plan_logprobs(packet: Packet, slots: Slots, rows: SampleRows, vocab_size: int) -> list[LogprobPlan]:
    """One plan for each slice of rows that ask for the same logprobs."""
    by_kind: dict[tuple[int, str, tuple[int, ...], bool], list[int]] = {}
    for row in np.flatnonzero(slots.logprobs[rows.slots]):
        params = slots.params[rows.slots[row]]
        if params.logprobs is not None:
            scaled = params.logprobs_mode.startswith("processed") and params.temperature > 0
            kind = params.logprobs, params.logprobs_mode, params.told, scaled
            by_kind.setdefault(kind, []).append(int(row))
    plans, size = list[LogprobPlan](), slice_rows(vocab_size)
    for (count, mode, told, scaled), members in by_kind.items():
        for part in (members[first : first + size] for first in range(0, len(members), size)):
            draws = plan_draw(packet, slots, rows, np.array(part)) if scaled else None
            plans.append(LogprobPlan(packet.ints(part), part, count, mode, told, draws))
    return plans


def sample(
    logits: Tensor,
    plan: SamplingPlan,
    tokens: Tensor,
    scan: Scan,
    *,
    draw: Draw,
    forbid: Callable[[Tensor], None] | None = None,
    process: Callable[[Tensor], dict[int, str]] | None = None,
) -> SampledTokens:
    """Sample from `logits` [R, V] float32, which are overwritten.

    `forbid` writes bounds into them. `process` changes what penalties leave -> `SampledTokens.failed`.
    """
    logits = logits.contiguous()
    asked, told = list[Tensor](), list[Tensor]()
    for wanted in plan.logprobs:
        asked.append(logits[wanted.rows])  # copies, before anything is masked
        told.append(told_logprobs(asked[-1], wanted.told))
    if forbid is not None:
        forbid(logits)
        for at, wanted in enumerate(plan.logprobs):
            asked[at] = logits[wanted.rows]  # of choices, those that may come
    if plan.masks is not None:
        plan.masks.apply(logits, tokens)
    for rules in plan.timestamps:
        rules.apply(logits, tokens)
    for at, wanted in enumerate(plan.logprobs):
        if wanted.mode == "masked_logprobs":
            asked[at] = logits[wanted.rows]
    for penalties in plan.penalties:
        penalties.apply(logits, tokens)
    failed = {} if process is None else process(logits)
    for filter in plan.filters:
        filter.apply(logits)
    grouped = GroupedLogits(logits, scan)
    sampled = grouped.best[0]  # [R] the likeliest tokens, overwritten where a row is drawn at random
    for draws in plan.draws:
        sampled[draws.rows] = draw(grouped, draws).int()
    tables = list[Tensor]()
    for each, beside, wanted in zip(asked, told, plan.logprobs, strict=True):
        chosen = sampled[wanted.rows].long()
        if wanted.mode.startswith("processed"):
            each = processed_logits(grouped, wanted.rows, wanted.draws, chosen)
        tables.append(torch.cat([logprob_table(each, chosen, wanted.count, wanted.mode), beside], 1))
    return SampledTokens(grouped.best, tables, failed)
