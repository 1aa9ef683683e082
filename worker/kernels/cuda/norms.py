"""Norms by Triton: `rms_norm`, `layer_norm`, both with the sum that comes before, and `front_rms_norm`.

A program computes one row, in float32, and reads it once. Weights may be float32 beside a narrower row. As in
the reference, a sum is rounded before it is normalised, because the next layer adds to what was rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.ops import latent_ops, reference
from worker.kernels.cuda.launch import launch, padded, warps_for

_MOST_WIDTH = 1 << 16
"""The widest row that a program holds in registers."""


@triton.jit
def norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, x_stride, residual_stride, width, eps,
    ADDS: constexpr, CENTRED: constexpr, BIASED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Normalise one row [width] of x, or of x plus the residual; CENTRED: by a layer norm."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + row * residual_stride + at, mask=there, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + at, rounded, mask=there)
        x = rounded.to(tl.float32)
    if CENTRED:
        x = tl.where(there, x - tl.sum(x, 0) / width, 0.0)
    x = x / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    x *= tl.load(weight_ptr + at, mask=there, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, x.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def norm_front(x_ptr, weight_ptr, out_ptr, x_stride, front, width, eps, BLOCK: constexpr):
    """Normalise the first numbers [front] of one row [width]; the others pass."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there, normed = at < width, at < front
    x = tl.load(x_ptr + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(tl.where(normed, x * x, 0.0), 0) / front + eps)
    factors = factor * tl.load(weight_ptr + at, mask=normed, other=0.0).to(tl.float32)
    x = tl.where(normed, x * factors, x)
    tl.store(out_ptr + row * width + at, x.to(out_ptr.dtype.element_ty), mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if _fit(x, weight):
        return _run(x, None, weight, None, eps, centred=False)[0]
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not (_fit(x, weight) and _alike(x, residual)):
        return reference.add_rms_norm(x, residual, weight, eps)
    return _run(x, residual, weight, None, eps, centred=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if not _fit(x, weight, bias):
        return reference.layer_norm(x, weight, bias, eps)
    return _run(x, None, weight, bias, eps, centred=True)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if not (_fit(x, weight, bias) and _alike(x, residual)):
        return reference.add_layer_norm(x, residual, weight, bias, eps)
    return _run(x, residual, weight, bias, eps, centred=True)


def front_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    front, width = len(weight), x.shape[-1]
    if not (_fit(x[:, :front], weight) and width <= _MOST_WIDTH and x.stride(1) == 1):
        return latent_ops.front_rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = padded(width)
    launch(
        norm_front,
        (len(x),),
        *(x, weight, out, x.stride(0), front, width, eps, block),
        num_warps=warps_for(block),
    )
    return out


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """-> the norm, and the sum where there is a residual."""
    width = x.shape[-1]
    rows = _rows(x)
    residual_rows = rows if residual is None else _rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = padded(width)
    launch(
        norm,
        (len(rows),),
        *(rows, residual_rows, weight, bias, out, total),
        *(rows.stride(0), residual_rows.stride(0), width, eps),
        *(residual is not None, centred, bias is not None, block),
        num_warps=warps_for(block),
    )
    return out, total


def _rows(x: Tensor) -> Tensor:
    """x as rows [N, width], each of them contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _fit(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether there is a contiguous weight for each column of rows that a program can hold."""
    given = (weight,) if bias is None else (weight, bias)
    return 0 < x.shape[-1] <= _MOST_WIDTH and all(
        each.shape == x.shape[-1:] and each.is_contiguous() for each in given
    )


def _alike(x: Tensor, residual: Tensor) -> bool:
    return x.dtype == residual.dtype and x.shape == residual.shape


OPERATIONS: dict[str, Callable[..., Any]] = {
    operation.__name__: operation
    for operation in (rms_norm, add_rms_norm, layer_norm, add_layer_norm, front_rms_norm)
}
"""The operations of this module by name, for `models.ops.use`."""
