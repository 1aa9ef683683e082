"""The tensors of compressed-tensors: whole numbers, packed over inputs or one a byte, and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from models import ops
from models.checkpoint.weights import Weights
from models.ops.grouped_matrix import Grouped, from_column, sorted_by_group
from models.quantization.readers.group_slices import (
    SCALES,
    WORD_BITS,
    covering,
    grouped,
    groups_of,
    refuse,
    unread_codes,
)
from models.weight_coding import Coding
from models.weight_slices import Cut

PACKED, PLAIN = "weight_packed", "weight"


def read(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    columns_cut = cut if cut is not None and cut.dim == 1 else None
    codes = _codes(scope, coding, shape, cut)
    scales = _of_groups(scope, coding, shape, cut, "weight_scale", SCALES)
    zeros = None if coding.symmetric else _zeros(scope, coding, shape, cut)
    group_of = None
    if coding.ordered:
        kinds = ("int32", "int64")
        group_of = scope.stored("weight_g_idx", [shape[1]], kinds, covering(columns_cut, 1, shape[1])[0])
    scope.ignore("input_zero_point")
    if scope.headers_only:
        return None
    matrix = grouped(scope, coding, codes, scales, zeros)
    if group_of is not None:
        return sorted_by_group(matrix, groups_of(scope, group_of, matrix))
    return from_column(matrix, columns_cut.start if columns_cut else 0)


def _codes(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Tensor:
    """Read the codes [N, K] uint8."""
    outputs, inputs = shape
    if coding.format == "int-quantized":
        return _unsigned(coding, scope.codes(PLAIN, shape, ("int8",), cut))
    each = WORD_BITS // coding.bits
    stored = scope.stored("weight_shape", [2], ("int64", "int32"))
    if not scope.headers_only and scope.is_real and stored.tolist() != [outputs, inputs]:
        raise refuse(scope, "weight_shape", f"is {stored.tolist()}, not {[outputs, inputs]}")
    words, columns = covering(cut if cut and cut.dim == 1 else None, each, inputs, dim=1)
    rows = cut if cut and cut.dim == 0 else None
    packed = scope.codes(PACKED, [outputs, -(-inputs // each)], ("int32",), words or rows)
    return ops.split_words(packed, coding.bits)[:, columns]


def _zeros(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Tensor:
    """Read the codes of 0 [N, G] uint8."""
    if coding.format == "int-quantized":
        return _unsigned(coding, _of_groups(scope, coding, shape, cut, "weight_zero_point", ("int8",)))
    each = WORD_BITS // coding.bits
    words, rows = covering(cut if cut and cut.dim == 0 else None, each, shape[0], dim=0)
    groups = _groups_cut(coding, shape, cut) if cut and cut.dim == 1 else None
    size = [-(-shape[0] // each), _count(coding, shape)]
    packed = scope.stored("weight_zero_point", size, ("int32",), words or groups)
    return ops.split_words(packed.t(), coding.bits).t()[rows]


def _of_groups(
    scope: Weights,
    coding: Coding,
    shape: tuple[int, int],
    cut: Cut | None,
    name: str,
    kinds: tuple[str, ...],
) -> Tensor:
    """Read a tensor with a number for each group [N, G]. One for the whole matrix is given to each row."""
    stored = scope.stored_shape(name) or ()
    if not coding.group and stored in ((), (1,)) and scope.is_real:
        rows = shape[0] if cut is None or cut.dim == 1 else cut.stop - cut.start
        return scope.stored(name, stored, kinds).reshape(1, 1).expand(rows, 1)
    return scope.stored(name, [shape[0], _count(coding, shape)], kinds, _groups_cut(coding, shape, cut))


def _unsigned(coding: Coding, values: Tensor) -> Tensor:
    if values.is_meta:
        return unread_codes(values, values.shape[1])
    return (values.short() + (1 << (coding.bits - 1))).to(torch.uint8)


def _count(coding: Coding, shape: tuple[int, int]) -> int:
    return -(-shape[1] // coding.group) if coding.group else 1


def _groups_cut(coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Cut | None:
    """The cut of a tensor [N, G]."""
    if cut is None or cut.dim == 0:
        return cut
    return None if coding.ordered else covering(cut, coding.group or shape[1], shape[1], dim=1)[0]
