"""The memory of attention in plain torch, which devices without attention of their own need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.layers.attention import CachedAttention


def plain_attention_bytes(
    layers: Sequence[CachedAttention], tokens: int, longest: int, dtype: torch.dtype
) -> int:
    """An upper bound of the bytes that it takes, with `tokens` in a step and `longest` of a sequence."""
    chunk = min(tokens, longest)
    needed = (layer.step_bytes(tokens, longest, chunk, dtype.itemsize) for layer in layers)
    mask = tokens * longest * (1 + dtype.itemsize)
    return mask + max(needed, default=0)
