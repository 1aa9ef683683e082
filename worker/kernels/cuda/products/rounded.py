"""Products in 8 bits on both sides: torch multiplies inputs rounded to e4m3, by rows or groups of 128.

All steps take them, also those of one row: so results do not depend on how many tokens a step has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm
from triton.language import constexpr

from worker.kernels.cuda.capabilities import HOPPER, Card
from worker.kernels.cuda.launch import launch, power_of_2
from worker.kernels.cuda.products.packing import GROUP, LARGEST, LEAST_SCALE, Packed

logger = logging.getLogger(__name__)

_FILLED, _FILLED_GROUPS = 64, 16
"""The multiples to which rows are filled up. With scales of rows, torch takes longer for 16 rows on an H100
(44 us) than for 64 (37 us); scales of groups begin at a multiple of 64 bytes."""
_BLOCK = 1024
_MOST_BLOCK = 8192
"""The numbers of a row that have one scale and are read at a time."""
_TOLERANCE = 2**-7
_GROUP: constexpr = constexpr(GROUP)
_LARGEST: constexpr = constexpr(LARGEST)
_LEAST_SCALE: constexpr = constexpr(LEAST_SCALE)


@triton.jit
def _scale_of(largest):
    return tl.maximum(largest / _LARGEST, _LEAST_SCALE)


@triton.jit
def _rounded(x, scale, numbers_ptr):
    """Numbers divided by their scale, of the type to which `numbers_ptr` points."""
    y = x / scale
    y = tl.where(y > _LARGEST, _LARGEST, tl.where(y < -_LARGEST, -_LARGEST, y))
    return y.to(numbers_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["filled"])
def round_rows(
    x_ptr, scale_ptr, numbers_ptr, scales_ptr, width, filled, x_stride, inputs, GROUPED: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Round a row of any width, or BLOCK columns of it if groups of its inputs have scales of their own.

    It is filled up with zeros to `width`. Scales lie group by group, `filled` from one to the next. With
    `scale`, all rows have this one, and what is too large for it becomes the largest number.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    numbers_ptr += row * width
    columns = tl.arange(0, BLOCK)
    if GROUPED:
        piece = tl.program_id(1)
        at = piece * BLOCK + columns
        x = tl.load(x_ptr + at, mask=at < inputs, other=0.0).to(tl.float32)
        x = tl.reshape(x, [BLOCK // _GROUP, _GROUP])
        scale = _scale_of(tl.max(tl.abs(x), 1))
        group = piece * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
        tl.store(scales_ptr + group.to(tl.int64) * filled + row, scale, mask=group * _GROUP < width)
        numbers = tl.reshape(_rounded(x, scale[:, None], numbers_ptr), [BLOCK])
        tl.store(numbers_ptr + at, numbers, mask=at < width)
    else:
        if scale_ptr is not None:
            scale = tl.load(scale_ptr)
        else:
            largest = tl.zeros([BLOCK], tl.float32)
            for start in range(0, inputs, BLOCK):
                x = tl.load(x_ptr + start + columns, mask=start + columns < inputs, other=0.0)
                largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
            scale = _scale_of(tl.max(largest, 0))
        tl.store(scales_ptr + row, scale)
        for start in range(0, width, BLOCK):
            at = start + columns
            x = tl.load(x_ptr + at, mask=at < inputs, other=0.0).to(tl.float32)
            tl.store(numbers_ptr + at, _rounded(x, scale, numbers_ptr), mask=at < width)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows in e4m3, filled up to a multiple; nothing is written to those that are left over."""

    numbers: Tensor  # [rows, columns of the matrix]
    by_group: Tensor  # [groups, rows]: what each number is multiplied with

    @property
    def grouped(self) -> bool:
        """Whether a row has a scale for each 128 numbers, and not one for all."""
        return len(self.by_group) > 1

    @property
    def scales(self) -> Tensor:
        """What each number is multiplied with [rows, groups], group by group in memory."""
        return self.by_group.t() if self.grouped else self.by_group.view(-1, 1)


def rounds_inputs(weight: Packed, card: Card) -> bool:
    """Whether inputs of a matrix are rounded: where torch multiplies such numbers with its form of scales."""
    return (
        weight.rounds_inputs and card.rounds_inputs and (weight.blocks is None or card.capability == HOPPER)
    )


def multiply_in_8_bits(x: Tensor, weight: Packed, bias: Tensor | None, *, wide: bool) -> Tensor:
    """x [T, in], rounded, times a matrix [out, in] in e4m3 for which `rounds_inputs` is true."""
    given, matrix = round_inputs(x, weight), _codes(weight).t()
    if weight.blocks is None:
        recipe = ScalingType.RowWise
        out = scaled_mm(given.numbers, matrix, given.scales, recipe, _scales(weight), recipe)
    else:
        recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        out = scaled_mm(given.numbers, matrix, given.scales, recipes[0], weight.blocks, recipes[1])
    out = out[: len(x)].float() if wide else out[: len(x)]
    return out if bias is None else out + bias


def round_inputs(x: Tensor, weight: Packed) -> Rounded:
    """Round x [T, in], whose rows are contiguous, for the product with a matrix."""
    columns, groups = weight.width, len(_scales(weight))
    multiple = _FILLED if groups == 1 else _FILLED_GROUPS
    filled = -(-len(x) // multiple) * multiple
    rounded = Rounded(
        torch.empty(filled, columns, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(groups, filled, dtype=torch.float32, device=x.device),
    )
    block = _BLOCK if rounded.grouped else min(_MOST_BLOCK, power_of_2(columns))
    launch(
        round_rows,
        (len(x), -(-columns // block) if rounded.grouped else 1),
        *(x, weight.input_scale, rounded.numbers, rounded.by_group),
        *(columns, filled, x.stride(0), x.shape[1], rounded.grouped, block),
        num_warps=4 if block <= _BLOCK else 8,
    )
    return rounded


def _codes(weight: Packed) -> Tensor:
    """The numbers [out, width] of a matrix."""
    codes = weight.parts[0]
    assert codes is not None  # every matrix has them
    return codes.view(torch.float8_e4m3fn)


def _scales(weight: Packed) -> Tensor:
    """The scales [groups, out] of a matrix."""
    scales = weight.parts[1]
    assert scales is not None  # every matrix has them
    return scales


def torch_multiplies(card: Card, target: torch.device) -> bool:
    """Whether torch's products in 8 bits are right on this card: asked once, when it is opened."""
    try:
        for expected, *given in _known_products(card, target):
            out = scaled_mm(*given).float()
            if not (out - expected).norm() < _TOLERANCE * expected.norm():
                raise ValueError("a product differs from what it should be")
    except (RuntimeError, ValueError) as error:
        logger.error("torch's products in 8 bits fail on this card, so inputs keep 16: %s", error)
        return False
    return True


def _known_products(card: Card, target: torch.device) -> Iterator[tuple[Any, ...]]:
    """Products in float32, and what torch is to be given for each of them: of rows, and of blocks if any."""
    rows, blocks = 64, 2
    outputs = inputs = blocks * GROUP
    made = torch.Generator().manual_seed(0)

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, generator=made).to(target) + 0.5

    x, matrix = (
        torch.randn(count, inputs, generator=made).to(target, torch.float8_e4m3fn)
        for count in (rows, outputs)
    )
    of_x, of_matrix = scales(rows, 1), scales(outputs, 1)
    expected = (x.float() * of_x) @ (matrix.float() * of_matrix).t()
    yield expected, x, matrix.t(), of_x, ScalingType.RowWise, of_matrix.t(), ScalingType.RowWise
    if card.capability != HOPPER:
        return
    of_x, of_matrix = scales(blocks, rows).t(), scales(blocks, 4).t()  # groups fill up a multiple of four
    wide = x.float() * of_x.repeat_interleave(GROUP, 1)
    spread = of_matrix[:blocks].repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    forms = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    yield wide @ (matrix.float().t() * spread), x, matrix.t(), of_x, forms[0], of_matrix, forms[1]


def describe_rounding(weights: Iterable[Tensor], card: Card) -> str | None:
    """Say how many matrices have inputs that are rounded; None if none has."""
    parts = (part for weight in weights for part in getattr(weight, "apart", None) or (weight,))
    found = [part for part in parts if isinstance(part, Packed) and rounds_inputs(part, card)]
    if not found:
        return None
    static = sum(part.input_scale is not None for part in found)
    by_scales = f", {static} of them by scales of the checkpoint" if static else ""
    return f"inputs of {len(found)} matrices in e4m3 are rounded to 8 bits{by_scales}"
