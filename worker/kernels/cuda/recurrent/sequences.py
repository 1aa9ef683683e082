"""What kernels of layers with states share: the tokens of a row, and where its states lie.

The first index of a program is its row. One more row than a step has takes the tokens behind all rows, with
which a recorded step is filled up: their results are finite, and no state of theirs is read or written. The
tables of a step are those of `models.context.StateRows`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.context import ForwardContext
from models.state_rows import MOST_KEPT

KEPT: constexpr = constexpr(MOST_KEPT)


def tables_of(step: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
    """The first tokens, lengths and places of a step's sequences, as kernels read them."""
    if step.states is None:
        raise RuntimeError("a layer with states ran in a step that does not say where they are")
    return step.query_starts, step.kv_lens, step.states.table


@triton.jit
def tokens_of_row(starts_ptr, count):
    """The first token of a row and the one behind its last, and whether a sequence has them."""
    row = tl.program_id(0)
    real = row + 1 < tl.num_programs(0)
    first = tl.load(starts_ptr + row)
    last = tl.where(real, tl.load(starts_ptr + row + 1, mask=real, other=0), count)
    return first, last, real


@triton.jit
def goes_on(lens_ptr, first, last, real):
    """Whether a row has a state from earlier steps; a sequence that begins has zeros, whatever lies there."""
    length = tl.load(lens_ptr + tl.program_id(0), mask=real, other=0)
    return real & (length > last - first)


@triton.jit
def row_of_table(table_ptr, index, real):
    """The number that a row of a step has in row `index` of the table of states."""
    rows = tl.num_programs(0) - 1
    return tl.load(table_ptr + index * rows + tl.program_id(0), mask=real, other=0)


@triton.jit
def kept_counts(table_ptr, real):
    """After how many tokens states are kept, 0 where none is. Their number is MOST_KEPT."""
    return (
        row_of_table(table_ptr, 2, real),
        row_of_table(table_ptr, 4, real),
        row_of_table(table_ptr, 6, real),
    )


@triton.jit
def read_state(states_ptr, table_ptr, place_stride, at, there, continues):
    """The part `at` of the state before a step."""
    place = row_of_table(table_ptr, 0, continues).to(tl.int64)
    return tl.load(states_ptr + place * place_stride + at, mask=there & continues, other=0.0)


@triton.jit
def keep_state(states_ptr, table_ptr, place_stride, at, there, state, counts, done):
    """Write the part `at` of a state after `done` tokens wherever it is to be kept."""
    for each in tl.static_range(KEPT):  # pyright: ignore
        if counts[each] == done:
            place = row_of_table(table_ptr, 3 + 2 * each, True).to(tl.int64)
            tl.store(states_ptr + place * place_stride + at, state, mask=there)


@triton.jit
def write_state(states_ptr, table_ptr, place_stride, at, there, state):
    """Write the part `at` of the state after a step."""
    place = row_of_table(table_ptr, 1, True).to(tl.int64)
    tl.store(states_ptr + place * place_stride + at, state, mask=there)


@triton.jit
def fill_with_zeros(out_ptr, first, last, WIDTH: constexpr, column, there):
    """Let some columns of the results of tokens be 0."""
    out_ptr += first.to(tl.int64) * WIDTH
    for _ in range(first, last):
        zeros = tl.zeros(column.shape, out_ptr.dtype.element_ty)
        tl.store(out_ptr + column, zeros, mask=there)
        out_ptr += WIDTH


@triton.jit
def read_token(x_ptr, keys, columns, known, there, APART: constexpr):
    """The numbers of a token for the rows of a state, two of each that lie APART, and for its columns."""
    one = tl.load(x_ptr + keys, mask=known, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + APART + keys, mask=known, other=0.0).to(tl.float32)
    return one, other, tl.load(x_ptr + columns, mask=there, other=0.0).to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + e^x), also where e^x is small beside 1; beyond 20 it is x."""
    power = tl.exp(x)
    rounded = 1.0 + power
    exact = tl.where(rounded == 1.0, power, tl.log(rounded) * power / (rounded - 1.0))
    return tl.where(x > 20.0, x, exact)


MOST_ROWS_OF_STATE = 256
"""The widest keys whose slab of a state a program holds in registers."""
_COLUMNS = 16
"""The columns of a slab: 64 bytes of each row of a state, which is what memory moves at least."""


def slab_of(size: int, width: int) -> tuple[int, int, int]:
    """The padded rows and the columns of a slab of a state [size, width], and the warps that compute it."""
    rows = max(16, 1 << (size - 1).bit_length())
    columns = min(_COLUMNS, 1 << (width - 1).bit_length())
    return rows, columns, max(1, rows * columns // 2048)
