"""The tensors of GPTQ: codes packed over inputs, zero points over outputs, and the group of each input."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from models import ops
from models.coding import Coding
from models.ops.grouped_matrix import Grouped, from_column, sorted_by_group
from models.quantization.formats.scope import SCALES, WORD_BITS, Scope, covering, groups_of, refuse
from models.weight_pieces import Cut

MAIN = "qweight"


class _Tensors(NamedTuple):
    """The stored pieces of a matrix, and where in them the wanted outputs and inputs lie."""

    codes: Tensor  # int32 [K / each, N]
    columns: slice
    zeros: Tensor  # int32 [G, N / each]
    rows: slice
    scales: Tensor  # [G, N]
    group_of: Tensor | None  # [K]


def read(scope: Scope, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    tensors = _take(scope, coding, shape, cut)
    _ignore_zero_bias(scope, shape[0])
    if scope.headers_only:
        return None
    codes = ops.split_words(tensors.codes.t(), coding.bits)[:, tensors.columns]  # [N, K]
    zeros = ops.split_words(tensors.zeros, coding.bits)[:, tensors.rows]  # [G, N]
    if coding.format == "gptq":  # the first version stores one less
        if coding.bits == 8 and scope.is_real and (zeros == 255).any():
            raise refuse(scope, "qzeros", "holds 255, and the zero point 256 is none of the codes")
        zeros = zeros + 1
    matrix = Grouped(
        codes=codes,
        bits=coding.bits,
        group=coding.group,
        scales=tensors.scales.t(),
        offsets=None if _are_middle(zeros, coding) else zeros.t(),
        inputs=codes.shape[1],
        dtype=scope.dtype,
        input_bits=coding.input_bits,
    )
    if tensors.group_of is not None:
        return sorted_by_group(matrix, groups_of(scope, tensors.group_of, matrix))
    return from_column(matrix, cut.start if cut and cut.dim == 1 else 0)


def _take(scope: Scope, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> _Tensors:
    outputs, inputs = shape
    each, group = WORD_BITS // coding.bits, coding.group or inputs
    by_rows = cut is not None and cut.dim == 0
    columns_cut, rows_cut = (None, cut) if by_rows else (cut, None)
    words, columns = covering(columns_cut, each, inputs, dim=0)
    zero_words, rows = covering(rows_cut, each, outputs, dim=1)
    groups, _ = covering(None if coding.ordered else columns_cut, group, inputs, dim=0)
    exact_rows, _ = covering(rows_cut, 1, outputs, dim=1)
    group_of = None
    if coding.ordered:
        group_of = scope.stored("g_idx", [inputs], ("int32", "int64"), covering(columns_cut, 1, inputs)[0])
    else:
        scope.ignore("g_idx")  # old files have one of zeros
    count = -(-inputs // group)
    return _Tensors(
        codes=scope.stored(MAIN, [-(-inputs // each), outputs], ("int32",), words or exact_rows),
        columns=columns,
        zeros=scope.stored("qzeros", [count, -(-outputs // each)], ("int32",), groups or zero_words),
        rows=rows,
        scales=scope.stored("scales", [count, outputs], SCALES, groups or exact_rows),
        group_of=group_of,
    )


def _are_middle(zeros: Tensor, coding: Coding) -> bool:
    """Whether all zero points are the middle code; of tensors without values, whether they should be."""
    return coding.symmetric if zeros.is_meta else bool((zeros == 1 << (coding.bits - 1)).all())


def _ignore_zero_bias(scope: Scope, outputs: int) -> None:
    """Let a layer without a bias have one of zeros, which GPTQ's own tools save for every layer."""
    if "bias" in scope and scope.stored_shape("bias") == (outputs,):
        bias = scope.stored("bias", [outputs], SCALES)
        if not scope.headers_only and not bias.is_meta and bias.any():
            scope.expect("bias")
