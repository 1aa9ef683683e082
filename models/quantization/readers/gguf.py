"""The blocks of GGUF: so many numbers of a row with their scales, one block after the other.

Where the bits of a block lie is described in llama.cpp's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from models.checkpoint.weights import Weights
from models.ops.grouped_matrix import Factors, Grouped, from_column, stacked
from models.quantization.methods.gguf import CODINGS, GGML_TYPES
from models.quantization.readers.group_slices import covering, refuse, unread_codes
from models.weight_coding import Coding
from models.weight_slices import Cut

MAIN = "weight"
_SIZES = {size.name: size for size in GGML_TYPES.values()}
_DUMMY_SCALE, _DUMMY_POWER = 2.0**-10, 120
_NO_POWER = 255
"""The byte of a power of two that is NaN."""
_BYTES = 1 << 19
"""The bytes of blocks that are taken apart at a time."""


@dataclass(frozen=True)
class _Numbers:
    """The codes, scales and minimums in the blocks of a matrix."""

    codes: Tensor
    """[N, blocks, numbers] uint8."""
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
    unpack: Callable[[Tensor], _Numbers]
    """A function that takes blocks [N, blocks, bytes] apart."""
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
    rows = max(1, _BYTES // max(1, blocks[:1].numel()))  # in the caches this takes half the time, or less
    pieces = [_grouped(layout.unpack(some), coding, columns, scope.dtype) for some in blocks.split(rows)]
    matrix = cast("Grouped", stacked(pieces))
    if scope.is_real and not all(map(_are_finite, matrix.tensors()[1:])):
        raise refuse(scope, MAIN, f"has blocks ({coding.format}) with scales that are NaN or infinite")
    return from_column(matrix, columns_cut.start if columns_cut else 0)


def widened_blocks(blocks: Tensor, name: str) -> Tensor:
    """Rows of blocks [N, bytes] in GGML's coding `name` -> their numbers [N, numbers] in float32."""
    numbers = _LAYOUTS[name].unpack(blocks.unflatten(1, (-1, _SIZES[name].nbytes)))
    return _grouped(numbers, CODINGS[name], slice(None), torch.float32).widened()


def _unread(layout: _Layout, blocks: Tensor, coding: Coding, columns: slice, dtype: torch.dtype) -> Grouped:
    """Make the form of blocks without memory: codes have none, and all rows share one of other numbers."""
    row = _grouped(
        layout.unpack(torch.zeros(1, *blocks.shape[1:], dtype=torch.uint8)), coding, columns, dtype
    )
    codes, *others = row.tensors()
    shared = (numbers.expand(len(blocks), -1) for numbers in others)
    return row.of([unread_codes(blocks, codes.shape[1]), *shared])


def _are_finite(scales: Tensor) -> bool:
    if scales.dtype == torch.float8_e8m0fnu:  # torch compares none of them
        return not (scales.view(torch.uint8) == _NO_POWER).any()
    return not scales.is_floating_point() or bool(scales.isfinite().all())


def _grouped(numbers: _Numbers, coding: Coding, columns: slice, dtype: torch.dtype) -> Grouped:
    """Make the form of all these blocks, and cut off the codes of other columns; their scales may stay."""
    codes = numbers.codes.flatten(1)[:, columns]
    factors = None
    if numbers.factors is not None:
        factors = Factors(numbers.scales.shape[2], numbers.factors, numbers.minimum_factors)
    return Grouped(
        codes=codes,
        bits=coding.bits,
        group=coding.group,
        scales=numbers.scales.flatten(1),
        offsets=None,
        inputs=codes.shape[1],
        dtype=dtype,
        kind=coding.codes,
        minimums=None if numbers.minimums is None else numbers.minimums.flatten(1),
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


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., B] -> [..., 2 * B]: the low halves of all bytes, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [..., 4] -> [..., 32]: each bit of a word, the lowest first, as the fifth one of a code."""
    return ((packed.unsqueeze(-1) >> _shifts(packed, 8)) & 1).flatten(-2) << 4


def _shifts(like: Tensor, count: int, step: int = 1) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device)


def _around_zero(blocks: Tensor) -> _Numbers:
    """Q4_0: d (q - 8), as IQ4_NL with its table."""
    return _Numbers(_nibbles(blocks[..., 2:]), _half(blocks, 0).unsqueeze(-1))


def _q5_0(blocks: Tensor) -> _Numbers:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _Numbers(codes, _half(blocks, 0).unsqueeze(-1))


def _q8_0(blocks: Tensor) -> _Numbers:
    return _Numbers(blocks[..., 2:] ^ 128, _half(blocks, 0).unsqueeze(-1))


def _q4_1(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[..., 4:]), *_halves(blocks))


def _q5_1(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]), *_halves(blocks))


def _halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the minimum that a block begins with."""
    return _half(blocks, 0).unsqueeze(-1), _half(blocks, 2).unsqueeze(-1)


def _q4_k(blocks: Tensor) -> _Numbers:
    return _with_minimums(blocks, _in_turn(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> _Numbers:
    bits = (blocks[..., 16:48].unsqueeze(-2) >> _shifts(blocks, 8).unsqueeze(-1)) & 1  # [.., groups, 32]
    return _with_minimums(blocks, _in_turn(blocks[..., 48:]) | bits.flatten(-2) << 4)


def _in_turn(packed: Tensor) -> Tensor:
    """uint8 [..., 128] -> [..., 256]: of each 32 bytes the low halves, then the high ones."""
    return _nibbles(packed.unflatten(-1, (4, 32))).flatten(-2)


def _with_minimums(blocks: Tensor, codes: Tensor) -> _Numbers:
    """Q4_K and Q5_K: d sc q - dmin m, with eight scales and minimums of 6 bits in 12 bytes."""
    first, second, third = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = torch.cat([first & 63, (third & 15) | first >> 6 << 4], dim=-1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return _Numbers(codes, scales, minimums, _half(blocks, 0), -_half(blocks, 2))


def _q6_k(blocks: Tensor) -> _Numbers:
    """d sc (q - 32): of each code, four bits lie in one place and two in another."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # [.., halves, 128]
    pairs = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _shifts(blocks, 4, step=2).unsqueeze(-1)
    codes = (low | (pairs & 3).flatten(-2) << 4).flatten(-2)
    return _Numbers(codes, blocks[..., 192:208].view(torch.int8), factors=_half(blocks, 208))


def _iq4_xs(blocks: Tensor) -> _Numbers:
    """d (ls - 32) times a level of the table, with ls of 6 bits."""
    low = (blocks[..., 4:8].unsqueeze(-1) >> _shifts(blocks, 2, step=4)).flatten(-2) & 15
    high = (blocks[..., 2:4].unsqueeze(-1) >> _shifts(blocks, 4, step=2)).flatten(-2) & 3
    scales = (low | high << 4).view(torch.int8) - 32
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return _Numbers(codes, scales, factors=_half(blocks, 0))


def _mxfp4(blocks: Tensor) -> _Numbers:
    """A level of e2m1 times a power of two, which lies before the codes."""
    return _Numbers(_nibbles(blocks[..., 1:]), blocks[..., :1].view(torch.float8_e8m0fnu))


_LAYOUTS: Mapping[str, _Layout] = {
    "Q4_0": _Layout((0,), _around_zero),
    "Q4_1": _Layout((0, 2), _q4_1),
    "Q5_0": _Layout((0,), _q5_0),
    "Q5_1": _Layout((0, 2), _q5_1),
    "Q8_0": _Layout((0,), _q8_0),
    "Q4_K": _Layout((0, 2), _q4_k),
    "Q5_K": _Layout((0, 2), _q5_k),
    "Q6_K": _Layout((208,), _q6_k),
    "IQ4_NL": _Layout((0,), _around_zero),
    "IQ4_XS": _Layout((0,), _iq4_xs),
    "MXFP4": _Layout((), _mxfp4, power=0),
}
