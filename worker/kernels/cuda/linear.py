"""Linear layers on CUDA: cuBLAS multiplies plain matrices, our own kernel those that a checkpoint quantized.

A Triton kernel computes activations and gates behind either, and rounds them to 8 bits for products that read
them so.
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
from worker.kernels.cuda.card import Card
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.products import packing
from worker.kernels.cuda.products.fp8 import quantize_rows
from worker.kernels.cuda.products.grouped import look_up, multiply_grouped, multiply_plain
from worker.kernels.cuda.products.inputs import NOT_ROUNDED, InputForms, WithRounded
from worker.kernels.cuda.products.packing import Mixed, Packed
from worker.kernels.cuda.products.rounding_kernel import store_rounded

logger = logging.getLogger(__name__)

FUNCTIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
"""The activations, by the number that a variant of the kernel is compiled with."""
_BLOCK = 1024


@triton.jit
def activate(
    x_ptr, out_ptr, numbers_ptr, scales_ptr, columns, filled, x_stride, width, GROUPED: constexpr,
    FUNCTION: constexpr, GATED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Compute a piece [BLOCK] of a row [width]; GATED: times what lies `width` further in x.

    With `numbers` it is rounded to 8 bits, too, as `store_rounded` does it.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    if FUNCTION == 1:
        y = x / (1.0 + tl.exp(-x))
    elif FUNCTION == 2:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == 3:  # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = tl.where(x > 0, x, 0.0)
    if GATED:
        y *= tl.load(x_ptr + row * x_stride + width + at, mask=there, other=0.0).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + at, y, mask=there)
    if numbers_ptr is not None:
        y = y.to(tl.float32)
        store_rounded(y, row, tl.program_id(1), numbers_ptr, scales_ptr, columns, filled, GROUPED, BLOCK)


def bind(card: Card, forms: InputForms, *, fp8: bool = False) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`.

    `pack` adds to `forms`, which say what results of activations and gates are rounded.
    """

    def packed(*parts: Matrix, **options: Any) -> Tensor:
        weight = (pack_in_fp8 if fp8 else pack)(*parts, **options)
        if card.rounds_inputs:
            forms.add(weight)
        return weight

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        return _multiply(x, weight, bias, wide=wide, card=card)

    def linear(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kind: str | None = None, wide: bool = False
    ) -> Tensor:
        """Multiply. Logits that were rounded would change the likeliest token at one position in forty."""
        if kind is None:
            return multiply(x, weight, bias, wide=wide)
        out = activation(multiply(x, weight, bias), kind, forms)
        return out.float() if wide else out

    def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        return gated(multiply(x, weight, bias), kind, forms)

    return {
        "pack": packed,
        "linear": linear,
        "gated_linear": gated_linear,
        "embed": embed,
        "activation": activation,
        "gated": gated,
    }


def pack(
    *parts: Matrix,
    gated: bool = False,
    wide: bool = False,
    sections: int | None = None,
    plain: bool = False,
) -> Tensor:
    """Pack without sections, which would bring nothing: NCCL adds ranks up in an order of its own.

    Inputs of heads are never rounded to 8 bits: they decide between near neighbours.
    """
    if wide:
        parts = tuple(replace(part, input_bits=16) if isinstance(part, Grouped) else part for part in parts)
    grouped = [part for part in parts if isinstance(part, Grouped)]
    if not grouped:
        return reference.pack(*parts)
    if len(grouped) == len(parts) and all(alike(grouped[0], other) for other in grouped):
        return _pack_one(stacked(parts))
    return packing.pack_apart([_pack_one(part) for part in parts])


def pack_in_fp8(
    *parts: Matrix,
    gated: bool = False,
    wide: bool = False,
    sections: int | None = None,
    plain: bool = False,
) -> Tensor:
    """Make e4m3 of plain matrices, but not of heads, which decide between near neighbours."""
    if not (plain or wide):
        parts = tuple(quantize_rows(part) if isinstance(part, Tensor) else part for part in parts)
    return pack(*parts)


def _pack_one(matrix: Matrix) -> Packed | Tensor:
    if isinstance(matrix, Tensor):
        return matrix
    packed = packing.pack(matrix)
    if packed is None:
        _tell_once(matrix.bits, matrix.group)
        return matrix.widened()
    return packed


@cache
def _tell_once(bits: int, group: int) -> None:
    logger.info(
        "codes of %d bits in groups of %d inputs are widened: kernels know multiples of 16", bits, group
    )


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    return look_up(ids, weight) if type(weight) is Packed else reference.embed(ids, weight)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool, card: Card) -> Tensor:
    """x [T, in] times a matrix in any form."""
    if type(weight) is Packed:
        return multiply_grouped(x, weight, bias, wide=wide, card=card)
    if type(weight) is not Mixed:
        return multiply_plain(x, weight, bias, wide=wide)
    pieces = [_multiply(x, part, None, wide=wide, card=card) for part in weight.apart]
    out = torch.cat(pieces, dim=1)
    return out if bias is None else out + bias


def activation(x: Tensor, kind: str, forms: InputForms | None = None) -> Tensor:
    """Compute an activation; `forms` says whether the result is rounded, too."""
    if kind not in FUNCTIONS or not x.is_contiguous():
        return reference.activation(x, kind)
    return _run(x, torch.empty_like(x), kind, forms, gated=False)


def gated(gate_up: Tensor, kind: str, forms: InputForms | None = None) -> Tensor:
    """Compute a gate; `forms` says whether the result is rounded, too."""
    if kind not in FUNCTIONS or not gate_up.is_contiguous():
        return reference.gated(gate_up, kind)
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return _run(gate_up, out, kind, forms, gated=True)


def _run(x: Tensor, out: Tensor, kind: str, forms: InputForms | None, *, gated: bool) -> Tensor:
    width = out.shape[-1]
    rounded = None if forms is None else forms.room_beside(out)
    *places, grouped = NOT_ROUNDED if rounded is None else rounded.arguments
    block, warps = _BLOCK, 4
    if rounded is not None and not grouped:  # a program must see the whole row, in registers
        block = max(_BLOCK, 1 << (rounded.form.columns - 1).bit_length())
        warps = min(16, block // _BLOCK * 4)
    launch(
        activate,
        (out.numel() // width, -(-width // block)),
        *(x, out, *places, x.shape[-1], width, grouped, FUNCTIONS[kind], gated, block),
        num_warps=warps,
    )
    return WithRounded.join(out, rounded)
