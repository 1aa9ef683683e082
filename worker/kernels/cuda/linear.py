"""Linear layers on CUDA: cuBLAS multiplies plain matrices, our own kernel those that a checkpoint quantized.

A Triton kernel computes activations and gates behind either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.ops import reference
from models.ops.grouped_matrix import Grouped, Matrix, alike, stacked
from models.ops.lora_ops import Added
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.products import adapters, packing
from worker.kernels.cuda.products.packing import Mixed, Packed
from worker.kernels.cuda.products.quantized import look_up, multiply_plain, multiply_quantized

logger = logging.getLogger(__name__)

FUNCTIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu_squared": 5, "quick_gelu": 7}
"""The activations, by the number that a variant of the kernel is compiled with."""
GATES = {**FUNCTIONS, "clamped": 8}
"""The activations of gates likewise."""
_BLOCK = 1024


@triton.jit
def applied(x, FUNCTION: constexpr):
    """An activation of numbers in float32; 0 leaves them as they are, and 6 is the sigmoid function."""
    if FUNCTION == 0:
        y = x
    elif FUNCTION == 1:
        y = x / (1.0 + tl.exp(-x))
    elif FUNCTION == 2:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == 3:  # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif FUNCTION == 6:
        y = 1.0 / (1.0 + tl.exp(-x))
    elif FUNCTION == 7:
        y = x / (1.0 + tl.exp(-1.702 * x))
    else:
        y = tl.where(x > 0, x, 0.0)
        if FUNCTION == 5:
            y *= y
    return y


@triton.jit
def let_through(gate, x, FUNCTION: constexpr):
    """Numbers times the activation of their gates, in float32. 8 limits both, and adds 1 to numbers."""
    if FUNCTION == 8:
        gate = tl.where(gate > 7.0, 7.0, gate)
        x = 1.0 + tl.where(x > 7.0, 7.0, tl.where(x < -7.0, -7.0, x))
        y = applied(gate, 7) * x
    else:
        y = applied(gate, FUNCTION) * x
    return y


@triton.jit
def activate(
    x_ptr, out_ptr, x_stride, width, FUNCTION: constexpr, GATED: constexpr, BLOCK: constexpr
):  # fmt: skip
    """Compute a piece [BLOCK] of a row [width]; GATED: times what lies `width` further in x."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    if GATED:
        other = tl.load(x_ptr + row * x_stride + width + at, mask=there, other=0.0).to(tl.float32)
        y = let_through(x, other, FUNCTION)
    else:
        y = applied(x, FUNCTION)
    tl.store(out_ptr + row * width + at, y.to(out_ptr.dtype.element_ty), mask=there)


def operations(card: Card, *, fp8: bool = False) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`. `fp8`: whether `pack` makes e4m3."""

    def linear(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kind: str | None = None,
        wide: bool = False,
        added: Added | None = None,
    ) -> Tensor:
        """Multiply. Logits that were rounded would change the likeliest token at one position in forty."""
        if kind is None:
            return product(x, weight, bias, added, wide=wide)
        out = activation(product(x, weight, bias, added), kind)
        return out.float() if wide else out

    def gated_linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, *, added: Added | None = None
    ) -> Tensor:
        return gated(product(x, weight, bias, added), kind)

    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None, added: Added | None, *, wide: bool = False
    ) -> Tensor:
        out = _multiply(x, weight, bias, card, wide=wide)
        if added is not None:
            adapters.add(out, bias, added)
        return out

    return {
        "pack": pack_in_fp8 if fp8 else pack,
        "linear": linear,
        "gated_linear": gated_linear,
        "embed": embed,
        "activation": activation,
        "gated": gated,
        **adapters.OPERATIONS,
    }


def pack(*parts: Matrix, wide: bool = False, **_: Any) -> Tensor:
    """Pack without sections, which would bring nothing: NCCL adds ranks up in an order of its own.

    Inputs of heads, which are `wide`, are never rounded to 8 bits: they decide between near neighbours.
    """
    if wide:
        parts = tuple(replace(part, input_bits=16) if isinstance(part, Grouped) else part for part in parts)
    grouped = [part for part in parts if isinstance(part, Grouped)]
    if not grouped:
        return reference.pack(*parts)
    if len(grouped) == len(parts) and all(alike(grouped[0], other) for other in grouped):
        return _pack_one(stacked(parts))
    return packing.pack_apart([_pack_one(part) for part in parts])


def pack_in_fp8(*parts: Matrix, wide: bool = False, plain: bool = False, **_: Any) -> Tensor:
    """Make e4m3 of plain matrices, but not of heads."""
    if not (plain or wide):
        parts = tuple(packing.in_e4m3(part) if isinstance(part, Tensor) else part for part in parts)
    return pack(*parts)


def _pack_one(matrix: Matrix) -> Packed | Tensor:
    if isinstance(matrix, Tensor):
        return matrix
    packed = packing.pack(matrix)
    if packed is None:
        _tell_once(matrix.bits, matrix.kind, matrix.group)
        return matrix.widened()
    return packed


@cache
def _tell_once(bits: int, kind: str, group: int) -> None:
    logger.info("codes of %d bits (%s) in groups of %d are widened: no kernel knows them", bits, kind, group)


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    return look_up(ids, weight) if type(weight) is Packed else reference.embed(ids, weight)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, card: Card, *, wide: bool = False) -> Tensor:
    """x [T, in] times a matrix in any form."""
    if type(weight) is Packed:
        return multiply_quantized(x, weight, bias, card, wide=wide)
    if type(weight) is not Mixed:
        return multiply_plain(x, weight, bias, wide=wide)
    pieces = [_multiply(x, part, None, card, wide=wide) for part in weight.apart]
    out = torch.cat(pieces, dim=1)
    return out if bias is None else out + bias


def activation(x: Tensor, kind: str) -> Tensor:
    if kind not in FUNCTIONS or not x.is_contiguous():
        return reference.activation(x, kind)
    return _run(x, torch.empty_like(x), kind, gated=False)


def gated(gate_up: Tensor, kind: str) -> Tensor:
    if kind not in GATES or not gate_up.is_contiguous():
        return reference.gated(gate_up, kind)
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return _run(gate_up, out, kind, gated=True)


def _run(x: Tensor, out: Tensor, kind: str, *, gated: bool) -> Tensor:
    width = out.shape[-1]
    launch(
        activate,
        (out.numel() // width, -(-width // _BLOCK)),
        *(x, out, x.shape[-1], width, GATES[kind], gated, _BLOCK),
        num_warps=4,
    )
    return out
