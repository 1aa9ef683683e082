"""Numbers of 8 bits, as a KV cache may hold them."""

from __future__ import annotations

import torch
from torch import Tensor

CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The number types of 8 bits that a KV cache may have, by the names of `--kv-cache-dtype`."""


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers for a cache: in 8 bits, those that are too large become the largest."""
    if x.dtype == dtype or dtype.itemsize > 1:
        return x.to(dtype)
    most = torch.finfo(dtype).max
    return x.float().clamp(-most, most).to(dtype)
