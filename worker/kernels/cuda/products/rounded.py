"""Products in 8 bits on both sides: inputs are rounded to e4m3, row by row or in groups of 128.

For steps of many rows, whose products take as long as the matrix unit needs for them: it computes twice as
many numbers of 8 bits as of 16. torch multiplies where it knows the form of the scales, else our own kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from worker.kernels.cuda.capabilities import HOPPER, Card, rounded_tiles
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.products.packing import Packed
from worker.kernels.cuda.products.rounded_kernel import GROUP, multiply_rounded, round_rows

logger = logging.getLogger(__name__)

_OUTPUTS = 16
"""The multiple of outputs that torch's product of rows asks for."""
_FILLED = 16
"""The multiple to which rows are filled up, so that scales of groups begin at a multiple of 64 bytes."""
_BLOCK = 1024
_TOLERANCE = 2**-7


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows in e4m3, filled up to a multiple of 16; nothing is written to those that are left over."""

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


def multiply_in_8_bits(x: Tensor, weight: Packed, bias: Tensor | None, card: Card, *, wide: bool) -> Tensor:
    """x [T, in], rounded, times a matrix [out, in] in e4m3 whose `rounds_inputs` says that it may be."""
    given = round_inputs(x, weight)
    if card.scaled_mm and not wide and x.dtype == torch.bfloat16:
        out = _by_torch(given, weight, card)
        if out is not None:
            return out[: len(x)] if bias is None else out[: len(x)] + bias
    out = torch.empty(len(x), weight.outputs, dtype=torch.float32 if wide else x.dtype, device=x.device)
    _by_triton(given, weight, bias, out, card)
    return out


def round_inputs(x: Tensor, weight: Packed) -> Rounded:
    """Round x [T, in], whose rows are contiguous, for the product with a matrix."""
    columns, filled = weight.width, -(-len(x) // _FILLED) * _FILLED
    rounded = Rounded(
        torch.empty(filled, columns, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(len(_scales(weight)), filled, dtype=torch.float32, device=x.device),
    )
    launch(
        round_rows,
        (len(x), -(-columns // _BLOCK) if rounded.grouped else 1),
        *(x, weight.input_scale, rounded.numbers, rounded.by_group),
        *(columns, filled, x.stride(0), x.shape[1], rounded.grouped, _BLOCK),
        num_warps=4,
    )
    return rounded


def _by_torch(given: Rounded, weight: Packed, card: Card) -> Tensor | None:
    """The product [T', out] in bfloat16; None if torch knows no such form on this card."""
    matrix, of_matrix = _codes(weight).t(), _scales(weight)
    if not given.grouped:
        if weight.outputs % _OUTPUTS:
            return None
        rows = ScalingType.RowWise
        return scaled_mm(given.numbers, matrix, given.scales, rows, of_matrix, rows)
    if card.capability != HOPPER or weight.blocks is None:
        return None
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(given.numbers, matrix, given.scales, recipes[0], weight.blocks, recipes[1])


def _by_triton(given: Rounded, weight: Packed, bias: Tensor | None, out: Tensor, card: Card) -> None:
    rows, outputs = out.shape
    tiles = rounded_tiles(card.capability)
    launch(
        multiply_rounded,
        (-(-outputs // tiles.outputs), -(-rows // tiles.rows)),
        *(given.numbers, given.by_group, _codes(weight), _scales(weight), bias, out),
        *(rows, len(given.numbers), outputs, weight.width, given.grouped),
        *(tiles.rows, tiles.outputs, GROUP if weight.width % GROUP == 0 else 64),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


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
        logger.error("torch's products in 8 bits fail on this card, so our own kernel multiplies: %s", error)
        return False
    return True


def _known_products(card: Card, target: torch.device) -> Iterator[tuple[Any, ...]]:
    """Products in float32, and what torch is to be given for each of them: of rows, and of blocks if any."""
    rows, blocks = 48, 2
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


def describe_rounding(weights: Iterable[Tensor], rows: int) -> str | None:
    """Say how many matrices have inputs that are rounded in steps of so many rows; None if none has."""
    parts = (part for weight in weights for part in getattr(weight, "apart", None) or (weight,))
    found = [part for part in parts if isinstance(part, Packed) and part.rounds_inputs]
    if not found:
        return None
    static = sum(part.input_scale is not None for part in found)
    by_scales = f", {static} of them by scales of the checkpoint" if static else ""
    return (
        f"inputs of {len(found)} matrices in e4m3 are rounded to 8 bits in steps of {rows} tokens and more"
        f"{by_scales}; in shorter ones they keep 16"
    )
