"""The parts that kernels of layers with states share: finding a row's tokens, reading and writing states.

Short rows are computed token by token. The first index of such a program is its row. One more row than a
step has takes the tokens behind all rows, with which a recorded step is filled up: their results are finite,
and no state of theirs is read or written. Rows of LEAST tokens and more, here called prompts, are computed in
tiles of tokens. The tables of a step are those of `models.context.StateRows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.context import ForwardContext
from models.state_rows import MOST_KEPT
from worker.kernels.cuda.capabilities import Card, has_large
from worker.kernels.cuda.launch import padded, power_of_2

KEPT: constexpr = constexpr(MOST_KEPT)
LEAST: constexpr = constexpr(32)
"""The tokens from which on a row is computed in tiles: an H100 takes as long for them token by token."""
_ANY = 2**31 - 1
"""More tokens than a row may have."""
EXACT = {torch.float32}
"""Number types whose rows are all computed token by token, which keeps all digits."""
_STARTS: constexpr = constexpr(64)
"""The rows of a step that a program looks at together."""


def tables_of(step: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
    """The first tokens, lengths and places of a step's sequences, as kernels read them."""
    if step.states is None:
        raise RuntimeError("a layer with states ran in a step that does not say where they are")
    return step.query_starts, step.kv_lens, step.states.table


def kinds_of_rows(x: Tensor, step: ForwardContext) -> tuple[int, int]:
    """The tokens below which rows are computed token by token, 0 if none is, and the most that are prompts.

    x [T, F]: the inputs of the step.
    """
    rows, least = step.states, LEAST.value
    if rows is None or x.dtype in EXACT:
        return _ANY, 0
    if not rows.host:  # a recording serves any rows
        return least, 0 if rows.single else min(len(step.kv_lens), len(x) // least)
    prompts = sum(count >= least for count in step.query_lens_host)
    return least if prompts < len(step.query_lens_host) else 0, prompts


@triton.jit
def tokens_of_row(starts_ptr, count):
    """The first token of a row and the one behind its last, and whether a sequence has them."""
    row = tl.program_id(0)
    real = row + 1 < tl.num_programs(0)
    first = tl.load(starts_ptr + row)
    last = tl.where(real, tl.load(starts_ptr + row + 1, mask=real, other=0), count)
    return first, last, real


@triton.jit
def rows_of(token, starts_ptr, rows):
    """The row of each token [N], which is `rows` for those behind all rows."""
    found = tl.zeros(token.shape, tl.int32) - 1
    for begin in range(0, rows + 1, _STARTS):
        each = begin + tl.arange(0, _STARTS)
        starts = tl.load(starts_ptr + each, mask=each <= rows, other=2147483647)
        found += tl.sum((starts[None, :] <= token[:, None]).to(tl.int32), 1)
    return found


@triton.jit
def prompt_of(number, starts_ptr, rows):
    """The row of the prompt with this number among the prompts of a step; `rows` if there are fewer."""
    found, before = rows, 0
    for begin in range(0, rows, _STARTS):
        each = begin + tl.arange(0, _STARTS)
        first = tl.load(starts_ptr + each, mask=each < rows, other=0)
        last = tl.load(starts_ptr + each + 1, mask=each < rows, other=0)
        long = (last - first >= LEAST).to(tl.int32)
        is_it = (long > 0) & (before + tl.cumsum(long, 0) == number + 1)
        found = tl.minimum(found, tl.min(tl.where(is_it, each, rows), 0))
        before += tl.sum(long, 0)
    return found


@triton.jit
def kept_counts(table_ptr, rows):
    """After how many tokens states are kept, 0 where none is. Their number is MOST_KEPT.

    `table_ptr`, here and below: the column of the row in the table of places, which has as many as `rows`.
    """
    return tl.load(table_ptr + 2 * rows), tl.load(table_ptr + 4 * rows), tl.load(table_ptr + 6 * rows)


@triton.jit
def read_state(states_ptr, table_ptr, length, new, place_stride, at, there):
    """The part `at` of the state before a step, which computes the last `new` of `length` tokens.

    A sequence that begins has zeros, whatever lies there.
    """
    place = tl.load(table_ptr).to(tl.int64)
    return tl.load(states_ptr + place * place_stride + at, mask=there & (length > new), other=0.0)


@triton.jit
def open_prompt(row, starts_ptr, lens_ptr, states_ptr, table_ptr, rows, place_stride, at, there):
    """The first token of a row and the one behind its last, its counts, and the part `at` of its state."""
    first, last, length = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1), tl.load(lens_ptr + row)
    state = read_state(states_ptr, table_ptr, length, last - first, place_stride, at, there)
    return first, last, kept_counts(table_ptr, rows), state


@triton.jit
def keep_state(states_ptr, table_ptr, rows, place_stride, at, there, state, counts, done):
    """Write the part `at` of a state after `done` tokens wherever it is to be kept."""
    for each in tl.static_range(KEPT):  # pyright: ignore
        if counts[each] == done:
            place = tl.load(table_ptr + (3 + 2 * each) * rows).to(tl.int64)
            tl.store(states_ptr + place * place_stride + at, state, mask=there)


@triton.jit
def write_state(states_ptr, table_ptr, rows, place_stride, at, there, state):
    """Write the part `at` of the state after a step."""
    place = tl.load(table_ptr + rows).to(tl.int64)
    tl.store(states_ptr + place * place_stride + at, state, mask=there)


@triton.jit
def next_end(counts, done, new):
    """How many of `new` tokens are done when the next state is to be kept, or at the end."""
    end = new
    for each in tl.static_range(KEPT):  # pyright: ignore
        end = tl.where(counts[each] > done, tl.minimum(end, counts[each]), end)
    return end


@triton.jit
def share_of(log):
    """The share whose logarithm this is; those above 0 are between tokens that do not see each other."""
    return tl.exp(tl.minimum(log, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def add_tile(state, keys, values, logs, mine):
    """A state behind the tokens of a tile that are `mine`, which add values under keys [TILE, numbers].

    `logs` [TILE]: the logarithms of the share of the state before the tile that is left after each token.
    """
    log = tl.min(tl.where(mine, logs, 0.0), 0)
    shares = tl.where(mine, share_of(log - logs), 0.0)
    added = (values * shares[:, None]).to(keys.dtype)
    return tl.dot(tl.trans(keys), added, state * tl.exp(log), input_precision="ieee")


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
    rows = padded(size)
    columns = min(_COLUMNS, power_of_2(width))
    return rows, columns, max(1, rows * columns // 2048)


def tile_of(card: Card, size: int, width: int) -> tuple[int, int]:
    """The tokens of a tile, and the columns of states [size, width] that a program multiplies them with.

    Shared memory holds up to three tiles: one is multiplied while the next one comes.
    """
    if size <= 128 and has_large(card.capability):
        return 64, min(32, padded(width))
    return 32 if size <= 128 else 16, min(16, padded(width))


def turns_of(prompts: int, programs: int, card: Card) -> int:
    """How many programs divide prompts among them, if a state takes so many: they fill a card twice."""
    return min(prompts, -(-2 * card.processors // programs))
