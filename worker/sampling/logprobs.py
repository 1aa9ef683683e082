"""Log-probabilities of chosen tokens and their likeliest rivals, from the model's raw logits, in float32.

Computed on the device into one int32 table per group of rows, so that they leave it with the tokens in one
copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.protocol import TokenLogprobs
from worker.tables.workspace import slice_rows

ALL = -1


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows that want the same number of rivals."""

    rows: Tensor  # [M] of the step's sampling rows
    rows_host: list[int]
    top: int


@dataclass(frozen=True, slots=True)
class PromptWanted:
    """The tokens of one sequence's prompt that this step can speak about."""

    slot: int
    at: slice  # [M] of the step's hidden states
    chosen: Tensor  # [M] the tokens that come next
    top: int


def rank_chosen(logits: Tensor, chosen: Tensor, top: int) -> Tensor:
    """[M, 1 + 2 * (1 + top)] int32: rank, ids, and the bits of the float32 values, the chosen token first."""
    logprobs = logits.log_softmax(-1)  # [M, V]
    own = logprobs.gather(1, chosen[:, None])  # [M, 1]
    rank = (logprobs > own).sum(-1, keepdim=True) + 1
    best = logprobs.topk(logprobs.shape[1] if top == ALL else min(top, logprobs.shape[1]))
    values = torch.cat([own, best.values], 1)
    return torch.cat([rank.int(), chosen[:, None].int(), best.indices.int(), values.view(torch.int32)], 1)


def rank_prompt(
    hidden: Tensor, wanted: PromptWanted, logits_of: Callable[[Tensor], Tensor], vocab_size: int
) -> Tensor:
    """The same for a prompt, some tokens at a time: its logits together would not fit anywhere."""
    size = slice_rows(vocab_size)
    parts = zip(hidden[wanted.at].split(size), wanted.chosen.split(size), strict=True)
    return torch.cat([rank_chosen(logits_of(states), chosen, wanted.top) for states, chosen in parts])


def read(table: np.ndarray) -> list[TokenLogprobs]:
    """What `rank_chosen` packed, row by row."""
    width = table.shape[1] // 2  # 1 + top
    ids = table[:, 1 : 1 + width].tolist()
    values = np.ascontiguousarray(table[:, 1 + width :]).view(np.float32).tolist()
    return [
        TokenLogprobs(ids=row_ids, values=row_values, rank=rank)
        for rank, row_ids, row_values in zip(table[:, 0].tolist(), ids, values, strict=True)
    ]
