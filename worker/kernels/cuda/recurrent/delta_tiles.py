"""The gated delta rule for prompts by Triton, in tiles of tokens, which the matrix unit multiplies.

Of a tile of tokens, let S be the state before it, g the share of S that is left after each token, b the
rates at which they learn, and A the part of b k k^T (g / g^T) below the diagonal. What they learn is u:

    (I + A) u = b (v - g k S);  out = g q S + (q k^T (g / g^T)) u;  S <- g S + k^T (g / g^T) u

`solve_tiles` inverts I + A and multiplies queries with keys, in all tiles at once. `learn_tiles` then walks
through the tiles of a row with some columns of one head's state in registers. Tiles begin at multiples of
TILE in a step, wherever rows do: in both matrices, numbers between tokens of different rows are 0. States and
shares are float32, and shares are powers of sums of logarithms, none of which is above 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.context import ForwardContext
from worker.kernels.cuda.capabilities import HOPPER, Card
from worker.kernels.cuda.launch import launch, padded
from worker.kernels.cuda.recurrent.sequences import (
    add_tile,
    keep_state,
    next_end,
    open_prompt,
    prompt_of,
    rows_of,
    share_of,
    softplus,
    tables_of,
    tile_of,
    turns_of,
    write_state,
)


@triton.jit
def key_head_of(head, KEY_HEADS: constexpr, HEADS: constexpr, TAKES_TURNS: constexpr):
    """The key head of a value head, which neighbours share, or every so many-th if they take turns."""
    return head % KEY_HEADS if TAKES_TURNS else head // (HEADS // KEY_HEADS)


@triton.jit(do_not_specialize=["count", "rows"])
def solve_tiles(
    x_ptr, gates_ptr, speeds_ptr, shifts_ptr, solved_ptr, asked_ptr, scales_ptr, starts_ptr, x_stride,
    gates_stride, count, rows, most_rate, KEY_HEADS: constexpr, HEADS: constexpr, KEY_DIM: constexpr,
    TAKES_TURNS: constexpr, KEYS: constexpr, TILE: constexpr, LEVELS: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Write the inverse of I + A, times rates, the products of queries and keys, and the scales of tokens.

    Blocks on the diagonal are inverted at first, of one token each, then of twice as many in each of LEVELS.
    """
    head, number = tl.program_id(1), tl.arange(0, TILE)
    token = tl.program_id(0) * TILE + number
    there, at = token < count, token.to(tl.int64)
    key, row = tl.arange(0, KEYS), rows_of(token, starts_ptr, rows)  # pyright: ignore
    x_ptr += key_head_of(head, KEY_HEADS, HEADS, TAKES_TURNS) * KEY_DIM
    x_ptr += at[:, None] * x_stride + key[None, :]
    inside = there[:, None] & (key < KEY_DIM)[None, :]
    q = tl.load(x_ptr, mask=inside, other=0.0)
    k = tl.load(x_ptr + KEY_HEADS * KEY_DIM, mask=inside, other=0.0)
    gates_ptr += at * gates_stride + head
    rate_gate = tl.load(gates_ptr, mask=there, other=0.0).to(tl.float32)
    decay_gate = tl.load(gates_ptr + HEADS, mask=there, other=0.0).to(tl.float32)
    rate = most_rate / (1.0 + tl.exp(-rate_gate))
    decay = tl.load(speeds_ptr + head) * softplus(decay_gate + tl.load(shifts_ptr + head))
    wide = k.to(tl.float32)
    key_scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
    wide = q.to(tl.float32)
    query_scale = 1.0 / tl.sqrt((tl.sum(wide * wide, 1) + 1e-6) * KEY_DIM)
    later, sooner = number[:, None], number[None, :]
    seen = (row[:, None] == row[None, :]) & (sooner <= later)
    logs = tl.sum(tl.where(seen, decay[None, :], 0.0), 1)
    shares = share_of(logs[:, None] - logs[None, :]) * key_scale[None, :]
    asked = tl.dot(q, tl.trans(k), input_precision="ieee") * query_scale[:, None]
    square = (at * HEADS + head)[:, None] * TILE + sooner
    asked = tl.where(seen, asked * shares, 0.0)
    tl.store(asked_ptr + square, asked.to(asked_ptr.dtype.element_ty), mask=there[:, None])
    a = tl.dot(k, tl.trans(k), input_precision="ieee") * shares * (rate * key_scale)[:, None]
    # No number is above the largest rate. What is not finite must not be multiplied with other rows' numbers.
    a = tl.where(seen & (sooner < later) & (tl.abs(a) <= 2.0 * most_rate), a, 0.0)
    solved = tl.where(later == sooner, 1.0, 0.0) - tl.where((later ^ sooner) == 1, a, 0.0)
    for level in range(1, LEVELS):
        below = tl.where(((later ^ sooner) >> level) == 1, a, 0.0)
        below = tl.dot(below, solved, input_precision=PRECISION)
        solved -= tl.dot(solved, below, input_precision=PRECISION)
    solved = tl.where(seen, solved * rate[None, :], 0.0)
    tl.store(solved_ptr + square, solved.to(solved_ptr.dtype.element_ty), mask=there[:, None])
    scales_ptr += head * count + token
    tl.store(scales_ptr, logs, mask=there)
    tl.store(scales_ptr + HEADS * count, key_scale, mask=there)
    tl.store(scales_ptr + 2 * HEADS * count, query_scale, mask=there)


@triton.jit(do_not_specialize=["count", "rows"])
def learn_tiles(
    x_ptr, solved_ptr, asked_ptr, scales_ptr, states_ptr, out_ptr, starts_ptr, lens_ptr, tables_ptr, x_stride,
    place_stride, count, rows, KEY_HEADS: constexpr, HEADS: constexpr, KEY_DIM: constexpr,
    VALUE_DIM: constexpr, TAKES_TURNS: constexpr, KEYS: constexpr, COLUMNS: constexpr, TILE: constexpr,
):  # fmt: skip
    """Compute every so many-th prompt of a step, for some columns of one value head."""
    head, within, number = tl.program_id(1), tl.arange(0, TILE), tl.program_id(2)
    key, column = tl.arange(0, KEYS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known, there = (key < KEY_DIM)[None, :], (column < VALUE_DIM)[None, :]
    inside = (key < KEY_DIM)[:, None] & there
    part = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + column[None, :]
    queries = (key_head_of(head, KEY_HEADS, HEADS, TAKES_TURNS) * KEY_DIM + key)[None, :]
    keys = queries + KEY_HEADS * KEY_DIM
    values = (2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column)[None, :]
    square = (head * TILE + within)[None, :]
    out_ptr += (head * VALUE_DIM + column)[None, :]
    scales_ptr += head * count
    row = prompt_of(number, starts_ptr, rows)
    while row < rows:
        table_ptr, done = tables_ptr + row, 0
        first, last, counts, state = open_prompt(
            row, starts_ptr, lens_ptr, states_ptr, table_ptr, rows, place_stride, part, inside
        )
        while first + done < last:
            start, done = first + done, next_end(counts, done, last - first)  # pyright: ignore
            for begin in range(start // TILE * TILE, first + done, TILE):
                token = begin + within
                at, held = token.to(tl.int64)[:, None], (token >= first) & (token < first + done)
                mine = held & (token >= start)
                real = mine[:, None]
                k = tl.load(x_ptr + at * x_stride + keys, mask=real & known, other=0.0)
                q = tl.load(x_ptr + at * x_stride + queries, mask=real & known, other=0.0)
                v = tl.load(x_ptr + at * x_stride + values, mask=real & there, other=0.0)
                solved = tl.load(solved_ptr + at * (HEADS * TILE) + square, mask=real, other=0.0)
                asked = tl.load(asked_ptr + at * (HEADS * TILE) + square, mask=real, other=0.0)
                logs = tl.load(scales_ptr + token, mask=held, other=0.0)
                key_scale = tl.load(scales_ptr + HEADS * count + token, mask=mine, other=0.0)
                query_scale = tl.load(scales_ptr + 2 * HEADS * count + token, mask=mine, other=0.0)
                logs -= tl.min(tl.where(mine, 0.0, logs), 0)  # what the tokens before `start` have left
                before, shares = state.to(k.dtype), share_of(logs)
                rest = v - tl.dot(k, before, input_precision="ieee") * (shares * key_scale)[:, None]
                answer = tl.dot(q, before, input_precision="ieee") * (shares * query_scale)[:, None]
                learnt = tl.dot(solved, rest.to(k.dtype), input_precision="ieee")
                answer = tl.dot(asked, learnt.to(k.dtype), answer, input_precision="ieee")
                tl.store(out_ptr + at * (HEADS * VALUE_DIM), answer.to(v.dtype), mask=real & there)
                state = add_tile(state, k, learnt * key_scale[:, None], logs, mine)
            keep_state(states_ptr, table_ptr, rows, place_stride, part, inside, state, counts, done)
        write_state(states_ptr, table_ptr, rows, place_stride, part, inside, state)
        number += tl.num_programs(2)
        row = prompt_of(number, starts_ptr, rows)


def learn_prompts(
    card: Card,
    x: Tensor,
    gates: Tensor,
    speeds: Tensor,
    shifts: Tensor,
    states: Tensor,
    out: Tensor,
    step: ForwardContext,
    most: int,
    key_heads: int,
    takes_turns: bool,
    most_rate: float,
) -> None:
    """Compute the rows of a step that are prompts, of which there are at most so many; out [T, V * dv]."""
    _, heads, key_dim, value_dim = states.shape
    (tile, columns), keys, tokens = tile_of(card, key_dim, value_dim), padded(key_dim), len(x)
    solved, asked = torch.empty(2, tokens, heads, tile, dtype=x.dtype, device=x.device)
    scales = torch.empty(3, heads, tokens, dtype=torch.float32, device=x.device)
    starts, lens, table = tables_of(step)
    rows, blocks = len(lens), -(-value_dim // columns)
    warps = 4 if card.capability == HOPPER and tile == 64 else 8  # so many multiply 64 rows there
    launch(
        solve_tiles,
        (-(-tokens // tile), heads),
        *(x, gates, speeds, shifts, solved, asked, scales, starts),
        *(x.stride(0), gates.stride(0), tokens, rows, most_rate),
        *(key_heads, heads, key_dim, takes_turns, keys, tile, tile.bit_length() - 1),
        "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps if tile == 64 else 4,
    )
    launch(
        learn_tiles,
        (blocks, heads, turns_of(most, blocks * heads, card)),
        *(x, solved, asked, scales, states, out, starts, lens, table),
        *(x.stride(0), states.stride(0), tokens, rows),
        *(key_heads, heads, key_dim, value_dim, takes_turns, keys, columns, tile),
        num_warps=warps,
        num_stages=3,
    )
