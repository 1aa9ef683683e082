"""Weights of 8 bits that are made on loading: e4m3, with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from models.ops.grouped_matrix import Grouped
from models.weight_coding import E4M3

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST = 1e-12
"""The least scale, for rows of zeros."""


def quantize_rows(weight: Tensor) -> Grouped:
    """Round a plain matrix [N, K]: the largest number of each row becomes the largest of the type."""
    scales = (weight.abs().amax(1, keepdim=True).float() / _LARGEST).clamp_min(_LEAST)
    codes = (weight.float() / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return Grouped(
        codes.view(torch.uint8), 8, 0, scales, None, weight.shape[1], weight.dtype, input_bits=8, kind=E4M3
    )
