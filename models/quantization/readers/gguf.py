"""The blocks of GGUF: so many numbers of a row with their scales, one block after the other.

Where the bits of a block lie is described in llama.cpp's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models import ops
from models.checkpoint.weights import Weights
from models.ops.block_codes import BitPlane
from models.ops.grouped_matrix import Factors, Grouped, from_column
from models.quantization.methods.gguf import CODINGS, GGML_TYPES
from models.quantization.readers.group_slices import covering, refuse, unread_codes
from models.weight_coding import Coding
from models.weight_slices import Cut

MAIN = "weight"
_SIZES = {size.name: size for size in GGML_TYPES.values()}
_DUMMY_SCALE, _DUMMY_POWER = 2.0**-10, 120
_NO_POWER = 255
"""The byte of a power of two that is NaN."""


@dataclass(frozen=True)
class _Scales:
    """The scales and minimums in the blocks of a matrix."""

    scales: Tensor
    """[N, blocks, groups]."""
    minimums: Tensor | None = None
    """[N, blocks, groups]."""
    factors: Tensor | None = None
    """[N, blocks]: what the scales of a block are multiplied with."""
    minimum_factors: Tensor | None = None


@dataclass(frozen=True)
class _Layout:
    """The layout of a block in its bytes."""

    halves: tuple[int, ...]
    """The places of numbers of float16."""
    scales_of: Callable[[Tensor], _Scales]
    """A function that finds the scales of blocks [N, blocks, bytes]."""
    codes: tuple[BitPlane, ...]
    """Where the bits of codes are, the lowest first."""
    flipped: int = 0
    """Bits of codes that are stored the other way round."""
    power: int | None = None
    """The place of a power of two, a byte."""


def read(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    layout, size = _LAYOUTS[coding.format], _SIZES[coding.format]
    columns_cut = cut if cut is not None and cut.dim == 1 else None
    blocks_cut, columns = covering(columns_cut, size.numbers, shape[1], dim=1)
    blocks = _read_blocks(scope, coding.format, shape, blocks_cut or cut)
    if blocks is None:
        return None
    if blocks.is_meta and scope.is_real:
        matrix = _unread(layout, blocks, coding, columns, scope.dtype)
        return from_column(matrix, columns_cut.start if columns_cut else 0)
    matrix = _grouped(layout, blocks, coding, columns, scope.dtype)
    if scope.is_real and not all(map(_are_finite, matrix.tensors()[1:])):
        raise refuse(scope, MAIN, f"has blocks ({coding.format}) with scales that are NaN or infinite")
    return from_column(matrix, columns_cut.start if columns_cut else 0)


def widened_blocks(blocks: Tensor, name: str) -> Tensor:
    """Rows of blocks [N, bytes] in GGML's coding `name` -> their numbers [N, numbers] in float32."""
    stored = blocks.unflatten(1, (-1, _SIZES[name].nbytes))
    return _grouped(_LAYOUTS[name], stored, CODINGS[name], slice(None), torch.float32).widened()


def _unread(layout: _Layout, blocks: Tensor, coding: Coding, columns: slice, dtype: torch.dtype) -> Grouped:
    """Make the form of blocks without memory: codes have none, and all rows share one of other numbers."""
    zeros = torch.zeros(1, *blocks.shape[1:], dtype=torch.uint8)
    row = _grouped(layout, zeros, coding, columns, dtype)
    codes, *others = row.tensors()
    shared = (numbers.expand(len(blocks), -1) for numbers in others)
    return row.of([unread_codes(blocks, codes.shape[1]), *shared])


def _are_finite(scales: Tensor) -> bool:
    if scales.dtype == torch.float8_e8m0fnu:  # torch compares none of them
        return not (scales.view(torch.uint8) == _NO_POWER).any()
    return not scales.is_floating_point() or bool(scales.isfinite().all())


def _grouped(layout: _Layout, blocks: Tensor, coding: Coding, columns: slice, dtype: torch.dtype) -> Grouped:
    """Make the form of all these blocks, and cut off the codes of other columns; their scales may stay."""
    count = _SIZES[coding.format].numbers
    codes = ops.split_blocks(blocks, count, layout.codes, layout.flipped)[:, columns]
    found, factors = layout.scales_of(blocks), None
    if found.factors is not None:
        factors = Factors(found.scales.shape[2], found.factors, found.minimum_factors)
    return Grouped(
        codes=codes,
        bits=coding.bits,
        group=coding.group,
        scales=found.scales.flatten(1),
        offsets=None,
        inputs=codes.shape[1],
        dtype=dtype,
        kind=coding.codes,
        minimums=None if found.minimums is None else found.minimums.flatten(1),
        factors=factors,
    )


def _read_blocks(scope: Weights, name: str, shape: tuple[int, int], cut: Cut | None) -> Tensor | None:
    """Read blocks [N, blocks, bytes]; a cut by columns counts blocks. None if only headers are compared."""
    size = _SIZES[name]
    row = shape[1] // size.numbers
    if not scope.is_real:
        wide = Cut(1, cut.start * size.nbytes, cut.stop * size.nbytes) if cut and cut.dim == 1 else cut
        made = scope.stored(MAIN, [shape[0], row * size.nbytes], ("uint8",), wide)
        made = made.unflatten(1, (-1, size.nbytes))
        for place in _LAYOUTS[name].halves:
            made[..., place : place + 2] = torch.tensor([_DUMMY_SCALE]).half().view(torch.uint8)
        if (place := _LAYOUTS[name].power) is not None:
            made[..., place] = _DUMMY_POWER
        return made
    if cut is not None and cut.dim == 1:
        cut = Cut(1, cut.start * size.numbers, cut.stop * size.numbers)
    stored = scope.codes(MAIN, shape, (name,), cut)
    if stored.is_meta:
        return stored.new_empty(len(stored), stored.shape[1] // size.numbers, size.nbytes)
    return None if scope.headers_only else stored.unflatten(1, (-1, size.nbytes))


def _half(blocks: Tensor, place: int) -> Tensor:
    """The number of float16 at a place of each block [N, blocks]."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).squeeze(-1)


def _one_scale(blocks: Tensor) -> _Scales:
    """Q4_0, Q5_0, Q8_0 and IQ4_NL: d times what a code means."""
    return _Scales(_half(blocks, 0).unsqueeze(-1))


def _one_minimum(blocks: Tensor) -> _Scales:
    """Q4_1 and Q5_1: d q + m."""
    return _Scales(_half(blocks, 0).unsqueeze(-1), _half(blocks, 2).unsqueeze(-1))


def _eight_minimums(blocks: Tensor) -> _Scales:
    """Q4_K and Q5_K: d sc q - dmin m, with eight scales and minimums of 6 bits in 12 bytes."""
    first, second, third = blocks[..., 4:16].contiguous().view(torch.int32).unbind(-1)  # four bytes at a time
    scales = torch.stack([first & 0x3F3F3F3F, third & 0x0F0F0F0F | first >> 2 & 0x30303030], dim=-1)
    minimums = torch.stack([second & 0x3F3F3F3F, third >> 4 & 0x0F0F0F0F | second >> 2 & 0x30303030], dim=-1)
    of_groups = scales.view(torch.uint8), minimums.view(torch.uint8)
    return _Scales(*of_groups, _half(blocks, 0), -_half(blocks, 2))


def _sixteen_scales(blocks: Tensor) -> _Scales:
    """Q6_K: d sc (q - 32)."""
    return _Scales(blocks[..., 192:208].view(torch.int8), factors=_half(blocks, 208))


def _eight_scales(blocks: Tensor) -> _Scales:
    """IQ4_XS: d (ls - 32) times a level of the table, with ls of 6 bits."""
    low = (blocks[..., 4:8].unsqueeze(-1) >> _shifts(blocks, 2, step=4)).flatten(-2) & 15
    high = (blocks[..., 2:4].unsqueeze(-1) >> _shifts(blocks, 4, step=2)).flatten(-2) & 3
    return _Scales((low | high << 4).view(torch.int8) - 32, factors=_half(blocks, 0))


def _shifts(like: Tensor, count: int, step: int) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device)


def _one_power(blocks: Tensor) -> _Scales:
    """MXFP4: a level of e2m1 times a power of two."""
    return _Scales(blocks[..., :1].view(torch.float8_e8m0fnu))


_LAYOUTS: Mapping[str, _Layout] = {
    "Q4_0": _Layout((0,), _one_scale, (BitPlane(2, 4, 16),)),
    "Q4_1": _Layout((0, 2), _one_minimum, (BitPlane(4, 4, 16),)),
    "Q5_0": _Layout((0,), _one_scale, (BitPlane(6, 4, 16), BitPlane(2, 1, 1))),
    "Q5_1": _Layout((0, 2), _one_minimum, (BitPlane(8, 4, 16), BitPlane(4, 1, 1))),
    "Q8_0": _Layout((0,), _one_scale, (BitPlane(2, 8, 32),), flipped=128),
    "Q4_K": _Layout((0, 2), _eight_minimums, (BitPlane(16, 4, 32),)),
    "Q5_K": _Layout((0, 2), _eight_minimums, (BitPlane(48, 4, 32), BitPlane(16, 1, 32))),
    "Q6_K": _Layout((208,), _sixteen_scales, (BitPlane(0, 4, 64), BitPlane(128, 2, 32))),
    "IQ4_NL": _Layout((0,), _one_scale, (BitPlane(2, 4, 16),)),
    "IQ4_XS": _Layout((0,), _eight_scales, (BitPlane(8, 4, 16),)),
    "MXFP4": _Layout((), _one_power, (BitPlane(1, 4, 16),), power=0),
}
