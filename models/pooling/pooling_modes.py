"""How the rows of a text are merged to one, by the pooling mode that its checkpoint names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models.pooling.sentence_files import Mode


def _weighted_mean(rows: Tensor, skip: int) -> Tensor:
    """A mean in which each token weighs as much as its position in the whole sequence, counted from 1."""
    weights = torch.arange(skip + 1, skip + len(rows) + 1, device=rows.device, dtype=torch.float32)  # [L]
    return (rows.float() * weights.unsqueeze(-1)).sum(0, keepdim=True) / weights.sum()


MERGERS: dict[Mode, Callable[[Tensor, int], Tensor]] = {
    "CLS": lambda rows, skip: rows[:1].float(),
    "LAST": lambda rows, skip: rows[-1:].float(),
    "MEAN": lambda rows, skip: rows.float().sum(0, keepdim=True) / len(rows),
    "MAX": lambda rows, skip: rows.amax(0, keepdim=True).float(),
    "MEAN_SQRT_LEN": lambda rows, skip: rows.float().sum(0, keepdim=True) / len(rows) ** 0.5,
    "WEIGHTED_MEAN": _weighted_mean,
}
"""Each function merges rows [L, H], before which `skip` others are left out, to [1, H]."""
