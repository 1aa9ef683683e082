"""The tensors of fp8, of mxfp4 and of nvfp4.

fp8 has bytes in e4m3, and scales of blocks, rows or the whole matrix. mxfp4 has two codes of e2m1 in a byte,
the first in its low half, and a power of 2 for each group; nvfp4 has a number of e4m3 instead, and another
one for the whole matrix.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from models.checkpoint.weights import Weights
from models.ops.grouped_matrix import Grouped, Matrix, from_column
from models.quantization.methods.fp8_mxfp4 import MXFP4, fp8_coding
from models.quantization.readers.group_slices import (
    SCALES,
    covering,
    grouped,
    read_one_scale,
    refuse,
    unread_codes,
)
from models.weight_coding import Coding
from models.weight_slices import Cut

FP8, FP8_KINDS = "weight", ("float8_e4m3fn",)
FP8_STACK_SCALES = "_scale_inv"
"""What the name of a stack's scales ends with."""
_OF_INPUTS = ("input_scale", "activation_scale")
_NAN = 127
"""The bits of the two codes of e4m3 that are no number, without their sign."""

PACKED, PACKED_KINDS = "weight_packed", ("uint8",)
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
"""What the names of a stack's tensors in mxfp4 end with."""
_NO_POWER = 255
_USUAL_POWER = 120
"""The power of scales that are made up: 2^-7."""


def read_fp8(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    scales = _fp8_scales(scope, coding, shape, cut)
    input_scale = None
    if coding.static_inputs:
        input_scale = read_one_scale(scope, _OF_INPUTS) if scope.is_real else 1.0
    stored = scope.codes(FP8, shape, FP8_KINDS, cut)
    if scope.headers_only:
        return None
    matrix = _fp8_matrix(scope, coding, FP8, stored, scales)
    group = coding.group if scales.shape[1] > 1 else 0
    matrix = replace(matrix, group=group, input_scale=input_scale)
    return from_column(matrix, cut.start if cut and cut.dim == 1 else 0)


def read_member(scope: Weights, name: str, members: int, shape: tuple[int, int], cut: Cut) -> Matrix | None:
    """Read a piece of one matrix [outputs, inputs] of a stack; None if the stack is in neither form.

    If only headers are compared, zeros.
    """
    if f"{name}{BLOCKS}" in scope:
        return _read_mxfp4_member(scope, name, members, shape, cut)
    if f"{name}{FP8_STACK_SCALES}" in scope:
        return _read_fp8_member(scope, name, members, shape, cut)
    return None


def _read_fp8_member(scope: Weights, name: str, members: int, shape: tuple[int, int], cut: Cut) -> Matrix:
    """A stack in fp8 is saved as bytes [members, outputs, inputs], with a scale for each [members, 1, 1]."""
    stored = scope.codes(name, [members, *shape], FP8_KINDS, cut)
    one_of_all = Cut(0, 0, 1, cut.member)
    scales = scope.stored(f"{name}{FP8_STACK_SCALES}", [members, 1, 1], SCALES, one_of_all)
    if scope.headers_only:
        return _zeros(scope, stored, members, shape, cut)
    coding = fp8_coding(0, 0, 16, static_inputs=False)
    return _fp8_matrix(scope, coding, name, stored, scales.float().expand(len(stored), 1))


def _zeros(scope: Weights, like: Tensor, members: int, shape: tuple[int, int], cut: Cut) -> Tensor:
    zeros = torch.zeros((), device=like.device, dtype=scope.dtype)
    return zeros.expand(cut.shape_of([members, *shape]))


def _fp8_matrix(scope: Weights, coding: Coding, name: str, stored: Tensor, scales: Tensor) -> Grouped:
    """Make the form of bytes, which were read from the tensor `name`, and of their scales [N, G]."""
    codes = stored.view(torch.uint8)
    if scope.is_real and not codes.is_meta and ((codes & _NAN) == _NAN).any():
        raise refuse(scope, name, "has numbers that are NaN")
    return grouped(scope, coding, codes, scales)


def _fp8_scales(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Tensor:
    """Read the scales and give them to each row: [N, G]. DeepSeek's are called inverse, and are not."""
    inverse = "weight_scale_inv" in scope or (coding.rows and not scope.is_real)
    name = "weight_scale_inv" if inverse else "weight_scale"
    outputs, inputs = shape
    start, stop = (cut.start, cut.stop) if cut and cut.dim == 0 else (0, outputs)
    if not coding.rows:
        stored = scope.stored_shape(name)
        wanted = stored if stored in ((), (1,), (1, 1), (outputs,)) else (outputs, 1)
        scales = scope.stored(name, wanted, SCALES).float().reshape(-1, 1)
        return scales.expand(stop - start, 1) if len(scales) == 1 else scales[start:stop]
    blocks = [-(-outputs // coding.rows), -(-inputs // coding.group)]
    if cut is not None and cut.dim == 1:
        piece, rows = covering(cut, coding.group, inputs, dim=1)[0], slice(0, outputs)
    else:
        piece, rows = covering(cut, coding.rows, outputs, dim=0)
    return scope.stored(name, blocks, SCALES, piece).float().repeat_interleave(coding.rows, dim=0)[rows]


def read_mxfp4(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    outputs, inputs = shape
    by_columns = cut if cut is not None and cut.dim == 1 else None
    rows = cut if by_columns is None else None
    pairs, columns = covering(by_columns, 2, inputs, dim=1)
    groups, _ = covering(by_columns, coding.group, inputs, dim=1)
    packed = scope.codes(PACKED, [outputs, -(-inputs // 2)], PACKED_KINDS, pairs or rows)
    size = [outputs, -(-inputs // coding.group)]
    scales = scope.stored("weight_scale", size, PACKED_KINDS, groups or rows)
    scope.ignore("input_global_scale")
    if scope.headers_only:
        return None
    matrix = _mxfp4_matrix(scope, "weight_scale", packed, columns, scales)
    return from_column(matrix, by_columns.start if by_columns else 0)


def read_nvfp4(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared.

    compressed-tensors divides by the scale of the whole matrix, ModelOpt multiplies with it.
    """
    outputs, inputs = shape
    by_columns = cut if cut is not None and cut.dim == 1 else None
    rows = cut if by_columns is None else None
    pairs, columns = covering(by_columns, 2, inputs, dim=1)
    groups, _ = covering(by_columns, coding.group, inputs, dim=1)
    divides = coding.format != "nvfp4"
    main, of_matrix = (PACKED, "weight_global_scale") if divides else (FP8, "weight_scale_2")
    packed = scope.codes(main, [outputs, -(-inputs // 2)], PACKED_KINDS, pairs or rows)
    size = [outputs, -(-inputs // coding.group)]
    scales = scope.stored("weight_scale", size, FP8_KINDS, groups or rows)
    whole = read_one_scale(scope, [of_matrix]) if scope.is_real else 1.0
    scope.ignore("input_global_scale", *_OF_INPUTS)
    if scope.headers_only:
        return None
    numbers = scales.float()
    if whole is None or numbers.isnan().any():
        raise refuse(scope, "weight_scale", f"has numbers that are NaN, or no {of_matrix} beside it")
    numbers = numbers / whole if divides else numbers * whole
    matrix = grouped(scope, coding, _pairs(packed, columns), numbers)
    return from_column(matrix, by_columns.start if by_columns else 0)


def _pairs(packed: Tensor, columns: slice) -> Tensor:
    """These columns of the codes [N, 2 C] that lie in bytes [N, C]."""
    if packed.is_meta:
        return unread_codes(packed, 2 * packed.shape[1])[:, columns]
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, columns]


def _read_mxfp4_member(scope: Weights, name: str, members: int, shape: tuple[int, int], cut: Cut) -> Matrix:
    """A stack in mxfp4 is saved as blocks [members, outputs, groups, 16], with a scale for each."""
    size, groups = MXFP4.group, -(-shape[1] // MXFP4.group)
    blocks_cut, columns = cut, slice(0, shape[1])
    if cut.dim == 1:
        first = cut.start // size
        blocks_cut = Cut(1, first, -(-cut.stop // size), cut.member)
        columns = slice(cut.start - first * size, cut.stop - first * size)
    all_groups = [members, shape[0], groups]
    blocks = scope.codes(f"{name}{BLOCKS}", [*all_groups, size // 2], PACKED_KINDS, blocks_cut)
    scales = scope.stored(f"{name}{BLOCK_SCALES}", all_groups, PACKED_KINDS, blocks_cut)
    if scope.headers_only:
        return _zeros(scope, scales, members, shape, cut)
    matrix = _mxfp4_matrix(scope, f"{name}{BLOCK_SCALES}", blocks.flatten(1), columns, scales)
    return from_column(matrix, cut.start if cut.dim == 1 else 0)


def _mxfp4_matrix(scope: Weights, name: str, packed: Tensor, columns: slice, scales: Tensor) -> Grouped:
    """Make the form of these columns of bytes [N, C], and of scales, which are the tensor `name`."""
    codes = _pairs(packed, columns)
    if not scope.is_real:
        scales = torch.full_like(scales, _USUAL_POWER)
    elif (scales == _NO_POWER).any():
        raise refuse(scope, name, "has scales that are NaN")
    return grouped(scope, MXFP4, codes, scales.contiguous().view(torch.float8_e8m0fnu))
