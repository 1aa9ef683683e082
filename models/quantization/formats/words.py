"""Codes of a few bits that are packed into words of 32 bits, the lowest first."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [R, C] -> uint8 [R, C, 32 / bits]: the codes of each word."""
    each = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))  # [R, C, 4], on little-endian machines
    if bits == 8:
        return each
    return torch.stack([each & 15, each >> 4], dim=-1).flatten(-2)
