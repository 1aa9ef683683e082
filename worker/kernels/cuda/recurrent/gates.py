"""Gates by Triton: rows times functions of gates, also with norms of heads or of groups of features.

Another rank may hold the rest of a group, so its sum of squares is an operation of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.ops import recurrent_ops
from worker.kernels.cuda.launch import launch, padded, warps_for
from worker.kernels.cuda.linear import FUNCTIONS, applied

OPENINGS = {"identity": 0, **FUNCTIONS, "sigmoid": 6}
"""The functions of gates, by their numbers in `applied`."""
_HEADS, _GROUPS = 1, 2
_BLOCK, _MOST_WIDTH = 1024, 1 << 16
"""The features of a program without a norm, and the widest head or group that one holds in registers."""


@triton.jit
def open_gates(
    x_ptr, gates_ptr, weight_ptr, squares_ptr, out_ptr, x_stride, gates_stride, features, count, eps,
    FUNCTION: constexpr, NORM: constexpr, EACH: constexpr, PIECE: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Compute PIECE features of a token: a head if NORM is 1, and a group if it is 2. A gate is for EACH."""
    token, piece, within = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    at = piece * PIECE + within
    there = (within < PIECE) & (at < features)
    x = tl.load(x_ptr + token * x_stride + at, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(gates_ptr + token * gates_stride + at // EACH, mask=there, other=0.0).to(tl.float32)
    opened = applied(gate, FUNCTION)
    if NORM == 1:
        weight = tl.load(weight_ptr + within, mask=there, other=0.0).to(tl.float32)
        x = x / tl.sqrt(tl.sum(x * x, 0) / PIECE + eps) * weight * opened
    elif NORM == 2:
        squares = tl.load(squares_ptr + token * tl.num_programs(1) + piece)
        x = x * opened / tl.sqrt(squares / count + eps)
        x *= tl.load(weight_ptr + at, mask=there, other=0.0).to(tl.float32)
    else:
        x *= opened
    tl.store(out_ptr + token * features + at, x.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def add_squares(x_ptr, gates_ptr, squares_ptr, x_stride, gates_stride, WIDTH: constexpr, BLOCK: constexpr):
    """Add up the squares of one group of features of a token, which are gated first if there are gates."""
    token, group, within = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    there, at = within < WIDTH, group * WIDTH + within
    x = tl.load(x_ptr + token * x_stride + at, mask=there, other=0.0).to(tl.float32)
    if gates_ptr is not None:
        gate = tl.load(gates_ptr + token * gates_stride + at, mask=there, other=0.0).to(tl.float32)
        x *= applied(gate, 1)
    tl.store(squares_ptr + token * tl.num_programs(1) + group, tl.sum(x * x, 0))


def gate(x: Tensor, gates: Tensor, kind: str) -> Tensor:
    if not _are_rows(x, gates) or kind not in OPENINGS:
        return recurrent_ops.gate(x, gates, kind)
    return _open(x, gates, kind, _BLOCK)


def gated_norm(x: Tensor, gates: Tensor, weight: Tensor, eps: float, kind: str = "silu") -> Tensor:
    if not _are_rows(x, gates) or len(weight) > _MOST_WIDTH or kind not in OPENINGS:
        return recurrent_ops.gated_norm(x, gates, weight, eps, kind)
    return _open(x, gates, kind, len(weight), _HEADS, weight, eps=eps)


def gated_group_norm(
    x: Tensor, gates: Tensor, weight: Tensor, squares: Tensor, count: int, eps: float
) -> Tensor:
    width = x.shape[1] // squares.shape[1]
    if not _are_rows(x, gates) or width > _MOST_WIDTH:
        return recurrent_ops.gated_group_norm(x, gates, weight, squares, count, eps)
    return _open(x, gates, "silu", width, _GROUPS, weight, squares, count, eps)


def group_squares(x: Tensor, gates: Tensor | None, groups: int, sections: int) -> Tensor:
    """Add up in one order whatever the sections, for NCCL adds ranks up in an order of its own."""
    width = x.shape[1] // groups
    if not _are_rows(x, x if gates is None else gates) or width > _MOST_WIDTH:
        return recurrent_ops.group_squares(x, gates, groups, sections)
    squares, block = torch.empty(len(x), groups, dtype=torch.float32, device=x.device), padded(width)
    launch(
        add_squares,
        (len(x), groups),
        *(x, gates, squares, x.stride(0), 0 if gates is None else gates.stride(0), width, block),
        num_warps=warps_for(block),
    )
    return squares


def _open(
    x: Tensor,
    gates: Tensor,
    kind: str,
    piece: int,
    norm: int = 0,
    weight: Tensor | None = None,
    squares: Tensor | None = None,
    count: int = 1,
    eps: float = 0.0,
) -> Tensor:
    """Launch pieces of so many features. `count`: the numbers in each sum of squares [T, groups]."""
    features, block = x.shape[1], padded(piece)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        open_gates,
        (len(x), -(-features // piece)),
        *(x, gates, weight, squares, out, x.stride(0), gates.stride(0), features, float(count), eps),
        *(OPENINGS[kind], norm, features // gates.shape[1], piece, block),
        num_warps=warps_for(block),
    )
    return out


def _are_rows(x: Tensor, gates: Tensor) -> bool:
    return x.dtype == gates.dtype and all(each.dim() == 2 and each.stride(1) == 1 for each in (x, gates))


OPERATIONS: dict[str, Callable[..., Any]] = {
    operation.__name__: operation for operation in (gate, gated_norm, group_squares, gated_group_norm)
}
"""The operations of this module by name, for `models.ops.use`."""
