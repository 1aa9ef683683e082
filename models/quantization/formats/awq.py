"""The tensors of AWQ: codes and zero points packed over outputs, in an order of AWQ's own."""

from __future__ import annotations

from models import ops
from models.coding import Coding
from models.ops.grouped_matrix import Grouped, from_column
from models.quantization.formats.scope import SCALES, WORD_BITS, Scope, covering
from models.weight_pieces import Cut

MAIN = "qweight"
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of its eight outputs."""


def read(scope: Scope, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    outputs, inputs = shape
    each, group = WORD_BITS // coding.bits, coding.group or inputs
    by_rows = cut is not None and cut.dim == 0
    columns_cut, rows_cut = (None, cut) if by_rows else (cut, None)
    of_rows, rows = covering(rows_cut, each, outputs, dim=1)
    of_columns, _ = covering(columns_cut, 1, inputs, dim=0)
    of_groups, _ = covering(columns_cut, group, inputs, dim=0)
    words, count = -(-outputs // each), -(-inputs // group)
    codes = scope.stored(MAIN, [inputs, words], ("int32",), of_columns or of_rows)
    zeros = scope.stored("qzeros", [count, words], ("int32",), of_groups or of_rows)
    exact_rows, _ = covering(rows_cut, 1, outputs, dim=1)
    scales = scope.stored("scales", [count, outputs], SCALES, of_groups or exact_rows)
    if scope.headers_only:
        return None
    matrix = Grouped(
        codes=ops.split_words(codes, coding.bits, _NIBBLES)[:, rows].t(),
        bits=coding.bits,
        group=coding.group,
        scales=scales.t(),
        offsets=ops.split_words(zeros, coding.bits, _NIBBLES)[:, rows].t(),
        inputs=len(codes),
        dtype=scope.dtype,
        input_bits=coding.input_bits,
    )
    return from_column(matrix, columns_cut.start if columns_cut else 0)
