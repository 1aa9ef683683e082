"""Log-probabilities, or logits, of tokens and of the likeliest ones beside them, in float32.

They are computed on the device into one int32 table per group of rows, so that they leave it with the tokens
in one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.protocol import TokenLogprobs
from worker.sampling.grouped_logits import slice_rows
from worker.sampling.top_k_top_p import Draws

ALL = -1


@dataclass(frozen=True, slots=True)
class LogprobPlan:
    """Sampling rows that ask for the same number of likeliest tokens."""

    rows: Tensor  # [M] of the step's sampling rows
    rows_host: list[int]
    count: int
    mode: str = "raw_logprobs"
    """The `Sampling.logprobs_mode` of all of them."""
    told: tuple[int, ...] = ()
    draws: Draws | None = None
    """How these rows are drawn, if the mode is a processed one and they are not greedy."""


@dataclass(frozen=True, slots=True)
class PromptLogprobPlan:
    """The tokens of one prompt whose log-probabilities this step can compute."""

    slot: int
    hidden: slice  # [M] of the step's hidden states
    tokens: slice  # [M] of the sequence's tokens, those that come after them
    count: int


def logprob_table(logits: Tensor, tokens: Tensor, count: int, mode: str = "raw_logprobs") -> Tensor:
    """Logits [M, V], tokens [M] -> [M, 1 + 2 * (1 + count)] int32: the token's rank, ids, bits of values."""
    logprobs = logits if mode.endswith("logits") else logits.log_softmax(-1)  # [M, V]
    own = logprobs.gather(1, tokens[:, None])  # [M, 1]
    rank = (logprobs > own).sum(-1, keepdim=True) + 1
    best = logprobs.topk(logprobs.shape[1] if count == ALL else min(count, logprobs.shape[1]))
    values = torch.cat([own, best.values], 1)
    return torch.cat([rank.int(), tokens[:, None].int(), best.indices.int(), values.view(torch.int32)], 1)


def told_logprobs(logits: Tensor, ids: tuple[int, ...]) -> Tensor:
    """Logits [M, V] -> the bits of the logprobs of some tokens [M, ids] int32."""
    if not ids:
        return logits.new_empty(len(logits), 0).view(torch.int32)
    return logits.log_softmax(-1)[:, list(ids)].contiguous().view(torch.int32)


def rows_at_once(vocab_size: int, kills: int) -> int:
    """The tokens of a prompt whose log-probabilities are computed at once, if so many workers were killed
    because memory ran out: an eighth as many for each."""
    return max(1, slice_rows(vocab_size) >> 3 * kills)


def prompt_logprob_table(
    plan: PromptLogprobPlan,
    tokens: Tensor,
    logits_of: Callable[[slice], Tensor],
    size: int,
) -> Tensor:
    """The table of a prompt, made of slices of `size` rows: all its logits would not fit. `tokens`: those of
    all slots.

    `logits_of` computes the logits of so many tokens of the step.
    """
    after = tokens[plan.slot, plan.tokens].long().split(size)
    starts = range(plan.hidden.start, plan.hidden.stop, size)
    rows = [slice(start, min(start + size, plan.hidden.stop)) for start in starts]
    parts = zip(rows, after, strict=True)
    return torch.cat([logprob_table(logits_of(part), tokens, plan.count) for part, tokens in parts])


def unpack_logprobs(table: np.ndarray, told: int = 0) -> list[TokenLogprobs]:
    """The rows of a table of `logprob_table`, behind which are those of so many tokens that are told."""
    width = (table.shape[1] - told) // 2  # 1 + count
    ids = table[:, 1 : 1 + width].tolist()
    values = np.ascontiguousarray(table[:, 1 + width :]).view(np.float32).tolist()
    return [
        TokenLogprobs(ids=row_ids, values=own[:width], rank=rank, told=own[width:])
        for rank, row_ids, own in zip(table[:, 0].tolist(), ids, values, strict=True)
    ]
