"""The tensors of GPTQ and AWQ: codes in words, zero points packed over outputs, scales [groups, outputs].

GPTQ packs codes over inputs, and may have the group of each input; AWQ packs them over outputs, in an order
of its own.
"""

from __future__ import annotations

from torch import Tensor

from models import ops
from models.checkpoint.weights import Weights
from models.ops.grouped_matrix import Grouped, from_column, sorted_by_group
from models.quantization.readers.group_slices import SCALES, WORD_BITS, covering, grouped, groups_of, refuse
from models.weight_coding import Coding
from models.weight_slices import Cut

MAIN = "qweight"
_WORDS = ("int32",)
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of its eight outputs."""


def read(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    outputs, inputs = shape
    is_awq, each, group = coding.format == "awq", WORD_BITS // coding.bits, coding.group or inputs
    columns_cut, rows_cut = (None, cut) if cut is not None and cut.dim == 0 else (cut, None)
    groups, _ = covering(None if coding.ordered else columns_cut, group, inputs, dim=0)
    of_words, rows = covering(rows_cut, each, outputs, dim=1)
    of_rows, _ = covering(rows_cut, 1, outputs, dim=1)
    group_of = None
    if coding.ordered:
        group_of = scope.stored("g_idx", [inputs], ("int32", "int64"), covering(columns_cut, 1, inputs)[0])
    elif not is_awq:
        scope.ignore("g_idx")  # old files have one of zeros
    count, words = -(-inputs // group), -(-outputs // each)
    if is_awq:
        pieces, columns = covering(columns_cut, 1, inputs, dim=0)
        packed = scope.codes(MAIN, [inputs, words], _WORDS, pieces or of_words)
    else:
        pieces, columns = covering(columns_cut, each, inputs, dim=0)
        packed = scope.codes(MAIN, [-(-inputs // each), outputs], _WORDS, pieces or of_rows)
    zeros = scope.stored("qzeros", [count, words], _WORDS, groups or of_words)
    scales = scope.stored("scales", [count, outputs], SCALES, groups or of_rows)
    if not is_awq:
        _ignore_zero_bias(scope, outputs)
    if scope.headers_only:
        return None
    if is_awq:
        codes = ops.split_words(packed, coding.bits, _AWQ_NIBBLES)[:, rows].t()
        offsets = ops.split_words(zeros, coding.bits, _AWQ_NIBBLES)[:, rows].t()
    else:
        codes = ops.split_words(packed.t(), coding.bits)[:, columns]
        offsets = _gptq_offsets(scope, coding, ops.split_words(zeros, coding.bits)[:, rows])
    matrix = grouped(scope, coding, codes, scales.t(), offsets)
    if group_of is not None:
        return sorted_by_group(matrix, groups_of(scope, group_of, matrix))
    return from_column(matrix, columns_cut.start if columns_cut else 0)


def _gptq_offsets(scope: Weights, coding: Coding, zeros: Tensor) -> Tensor | None:
    """Zero points [G, N] -> [N, G]; None if all are the middle code. Without values, `symmetric` tells."""
    if coding.format == "gptq":  # the first version stores one less
        if coding.bits == 8 and scope.is_real and (zeros == 255).any():
            raise refuse(scope, "qzeros", "holds 255, and the zero point 256 is none of the codes")
        zeros = zeros + 1
    are_middle = coding.symmetric if zeros.is_meta else bool((zeros == 1 << (coding.bits - 1)).all())
    return None if are_middle else zeros.t()


def _ignore_zero_bias(scope: Weights, outputs: int) -> None:
    """Let a layer without a bias have one of zeros, which GPTQ's own tools save for every layer."""
    if "bias" in scope and scope.stored_shape("bias") == (outputs,):
        bias = scope.stored("bias", [outputs], SCALES)
        if not scope.headers_only and not bias.is_meta and bias.any():
            scope.expect("bias")
