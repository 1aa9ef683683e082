"""What attention is told beside its tensors: the preparation of heads, and caches of 8 bits."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from models.context import ForwardContext


class HeadPrep(msgspec.Struct, frozen=True):
    """Heads are normalised, if there are norms; those of queries and keys are rotated if there are angles."""

    cos_sin: Tensor | None = None
    """This step's rotation [T, R] float32, as `rotate` reads it."""
    q_norm: Tensor | None = None
    """The weights [D] of an RMS norm over each query head. Both norms are there, or neither is."""
    k_norm: Tensor | None = None
    eps: float = 0.0
    v_norm: Tensor | None = None
    """The weights [D] of an RMS norm over each value head, of the number type of `q_norm`, which is there."""


AS_PROJECTED = HeadPrep()
"""Heads are used as they are projected."""


CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The number types of 8 bits that a KV cache may have, by the names of `--kv-cache-dtype`."""


class CacheScales(msgspec.Struct, frozen=True):
    """What the numbers of 8 bits of a layer's cache are to be multiplied with."""

    keys: float
    values: float


UNSCALED = CacheScales(1.0, 1.0)


def rounded(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Numbers for a cache: in 8 bits, divided by the scale, and too large ones become the largest."""
    if x.dtype == dtype or dtype.itemsize > 1:
        return x.to(dtype)
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype)


def widened(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Numbers of a cache in the number type of the model."""
    return x.to(dtype) if x.dtype.itemsize > 1 else (x.float() * scale).to(dtype)


def write_cache(
    k: Tensor, v: Tensor, kv: Tensor, context: ForwardContext, scales: CacheScales = UNSCALED
) -> None:
    """Write k and v [T, G, D] to the places of this step's tokens in kv [2, blocks, G, block_size, D]."""
    block, offset = context.slot_mapping // context.block_size, context.slot_mapping % context.block_size
    keys, values = kv.unbind(0)
    keys[block, :, offset] = rounded(k, kv.dtype, scales.keys)
    values[block, :, offset] = rounded(v, kv.dtype, scales.values)
