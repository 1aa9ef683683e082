"""The options of attention beside its tensors: the preparation of heads, and caches of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

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
"""The number types of 8 bits that a KV cache on CUDA may have, by the names of `--kv-cache-dtype`."""

CODES = torch.int8
"""The type of a KV cache on the CPU whose rows are codes of 8 bits and their own scale."""
_SCALE_TYPE = torch.bfloat16
_MOST_CODE, _MOST_WORD = 127, 32767


class CacheScales(msgspec.Struct, frozen=True):
    """The scales with which the 8-bit numbers of a layer's cache are multiplied."""

    keys: float
    values: float


UNSCALED = CacheScales(1.0, 1.0)


def stored_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a cache whose rows have the last of these sizes: behind codes lie the bytes of a scale."""
    *rows, dim = shape
    return *rows, dim + _SCALE_TYPE.itemsize if dtype == CODES else dim


def rounded(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Numbers for a cache: in 8 bits, divided by the scale, and too large ones become the largest.

    As `CODES` each row [..., D] gets a scale of its own, by which its largest number is 127, and 0 if all are
    0. One that is not finite makes the scale NaN.
    """
    if x.dtype == dtype or dtype.itemsize > 1:
        return x.to(dtype)
    if dtype == CODES:
        own = _scale_of(x, _MOST_CODE).to(_SCALE_TYPE)
        codes = (x.float() / own.float()).where(own > 0, 0).round().clamp(-_MOST_CODE - 1, _MOST_CODE)
        return torch.cat([codes.to(CODES), own.view(CODES)], dim=-1)
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype)


def _scale_of(x: Tensor, most: int) -> Tensor:
    """The scales [..., 1] with which the largest number of each row is `most`; NaN if it is not finite."""
    largest = x.to(torch.promote_types(x.dtype, torch.float32)).abs().amax(dim=-1, keepdim=True)
    return largest.where(largest.isfinite(), torch.nan) / most


def rounded_queries(q: Tensor) -> Tensor:
    """Queries [..., D] as they are compared with codes: whole numbers of 16 bits times a scale for each."""
    scale = _scale_of(q, _MOST_WORD)
    return (q / scale.where(scale != 0, 1)).round() * scale


def widened(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Numbers of a cache in the number type of the model."""
    if x.dtype == CODES:
        codes, own = x.split([x.shape[-1] - _SCALE_TYPE.itemsize, _SCALE_TYPE.itemsize], dim=-1)
        return codes.to(dtype) * own.view(_SCALE_TYPE)
    return x.to(dtype) if x.dtype.itemsize > 1 else (x.float() * scale).to(dtype)


def write_cache(
    k: Tensor, v: Tensor, kv: Tensor, context: ForwardContext, scales: CacheScales = UNSCALED
) -> None:
    """Write k and v [T, G, D] to the places of this step's tokens in kv [2, blocks, G, block_size, R].

    Rows have the sizes of `stored_shape`.
    """
    block, offset = context.slot_mapping // context.block_size, context.slot_mapping % context.block_size
    keys, values = kv.unbind(0)
    keys[block, :, offset] = rounded(k, kv.dtype, scales.keys)
    values[block, :, offset] = rounded(v, kv.dtype, scales.values)
