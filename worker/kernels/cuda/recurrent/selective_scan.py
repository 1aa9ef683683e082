"""The selective scan of Mamba-2 by Triton. A state S [size, width] of a head forgets by `decay`, then adds
the values v of a token, times its time step, under the keys b of its group, and is read by their queries c:

    S <- decay * S + b (time * v);  out = c S + skip * v

Columns of a state are independent of each other: a program holds some of one head in registers while all
tokens of a row pass, so a state is read and written once. Short rows are computed token by token, prompts in
tiles of tokens, which the matrix unit multiplies. If g is the share of S that is left after each token,

    out = g c S + (c b^T (g / g^T)) (time * v) + skip * v;  S <- g S + b^T (g / g^T) (time * v)

A share is the power of a sum of logarithms, none of which is above 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.context import ForwardContext
from models.ops import recurrent_ops
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.launch import launch, padded
from worker.kernels.cuda.recurrent.sequences import (
    MOST_ROWS_OF_STATE,
    add_tile,
    fill_with_zeros,
    keep_state,
    kept_counts,
    kinds_of_rows,
    next_end,
    open_prompt,
    prompt_of,
    read_state,
    read_token,
    share_of,
    slab_of,
    softplus,
    tables_of,
    tile_of,
    tokens_of_row,
    turns_of,
    write_state,
)


@triton.jit(do_not_specialize=["count", "limit"])
def scan(
    x_ptr, steps_ptr, speeds_ptr, shifts_ptr, skips_ptr, states_ptr, out_ptr, starts_ptr, lens_ptr, table_ptr,
    x_stride, steps_stride, place_stride, count, limit, least, most, GROUPS: constexpr, HEADS: constexpr,
    SIZE: constexpr, WIDTH: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """Compute the tokens of one row, if they are fewer than `limit`, for some columns of one head."""
    first, last, real = tokens_of_row(starts_ptr, count)  # pyright: ignore
    head = tl.program_id(1)
    key, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known, there = key < SIZE, column < WIDTH
    out_ptr += head * WIDTH
    if real & (first < last) & (last - first < limit):
        at = head * SIZE * WIDTH + key[:, None] * WIDTH + column[None, :]
        inside = known[:, None] & there[None, :]
        row, rows = tl.program_id(0), tl.num_programs(0) - 1
        table_ptr += row
        length = tl.load(lens_ptr + row)
        state = read_state(states_ptr, table_ptr, length, last - first, place_stride, at, inside)
        counts = kept_counts(table_ptr, rows)
        speed, shift = tl.load(speeds_ptr + head), tl.load(shifts_ptr + head)
        skip = tl.load(skips_ptr + head)
        x_ptr += first.to(tl.int64) * x_stride
        steps_ptr += first.to(tl.int64) * steps_stride + head
        out_ptr += first.to(tl.int64) * (HEADS * WIDTH)
        keys, values = HEADS * WIDTH + head // (HEADS // GROUPS) * SIZE + key, head * WIDTH + column
        b, c, v = read_token(x_ptr, keys, values, known, there, GROUPS * SIZE)
        step = tl.load(steps_ptr).to(tl.float32)
        for token in range(first, last):
            follows = token + 1 < last
            x_ptr += tl.where(follows, x_stride, 0)
            steps_ptr += tl.where(follows, steps_stride, 0)
            # What the next token needs is on its way while this one is computed.
            next_b, next_c, next_v = read_token(x_ptr, keys, values, known, there, GROUPS * SIZE)
            next_step = tl.load(steps_ptr).to(tl.float32)
            time = tl.minimum(most, tl.maximum(least, softplus(step + shift)))
            state = state * tl.exp(speed * time) + b[:, None] * (v * time)[None, :]
            answer = tl.sum(state * c[:, None], 0) + skip * v
            tl.store(out_ptr + column, answer.to(out_ptr.dtype.element_ty), mask=there)
            out_ptr += HEADS * WIDTH
            done = token + 1 - first
            keep_state(states_ptr, table_ptr, rows, place_stride, at, inside, state, counts, done)
            b, c, v, step = next_b, next_c, next_v, next_step
        write_state(states_ptr, table_ptr, rows, place_stride, at, inside, state)
    elif not real:
        fill_with_zeros(out_ptr, first, last, HEADS * WIDTH, column, there)


@triton.jit(do_not_specialize=["rows"])
def scan_tiles(
    x_ptr, steps_ptr, speeds_ptr, shifts_ptr, skips_ptr, states_ptr, out_ptr, starts_ptr, lens_ptr,
    tables_ptr, x_stride, steps_stride, place_stride, rows, least, most, GROUPS: constexpr,
    HEADS: constexpr, SIZE: constexpr, WIDTH: constexpr, ROWS: constexpr, COLUMNS: constexpr, TILE: constexpr,
):  # fmt: skip
    """Compute every so many-th prompt of a step, for some columns of one head."""
    head, within, number = tl.program_id(1), tl.arange(0, TILE), tl.program_id(2)
    key, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known, there = (key < SIZE)[None, :], (column < WIDTH)[None, :]
    inside = (key < SIZE)[:, None] & there
    part = head * SIZE * WIDTH + key[:, None] * WIDTH + column[None, :]
    keys = (HEADS * WIDTH + head // (HEADS // GROUPS) * SIZE + key)[None, :]
    values = (head * WIDTH + column)[None, :]
    seen = within[None, :] <= within[:, None]
    steps_ptr += head
    speed, shift, skip = tl.load(speeds_ptr + head), tl.load(shifts_ptr + head), tl.load(skips_ptr + head)
    row = prompt_of(number, starts_ptr, rows)
    while row < rows:
        table_ptr, done = tables_ptr + row, 0
        first, last, counts, state = open_prompt(
            row, starts_ptr, lens_ptr, states_ptr, table_ptr, rows, place_stride, part, inside
        )
        while first + done < last:
            start, done = first + done, next_end(counts, done, last - first)
            for begin in range(start // TILE * TILE, first + done, TILE):
                token = begin + within
                mine = (token >= start) & (token < first + done)
                at, real = token.to(tl.int64)[:, None], mine[:, None]
                b = tl.load(x_ptr + at * x_stride + keys, mask=real & known, other=0.0)
                c = tl.load(x_ptr + at * x_stride + keys + GROUPS * SIZE, mask=real & known, other=0.0)
                v = tl.load(x_ptr + at * x_stride + values, mask=real & there, other=0.0)
                step = tl.load(steps_ptr + token.to(tl.int64) * steps_stride, mask=mine, other=0.0)
                time = tl.minimum(most, tl.maximum(least, softplus(step.to(tl.float32) + shift)))
                time = tl.where(mine, time, 0.0)
                logs = tl.cumsum(speed * time, 0)
                read = tl.dot(c, tl.trans(b), input_precision="ieee") * time[None, :]
                read = tl.where(seen, read * share_of(logs[:, None] - logs[None, :]), 0.0)
                answer = tl.dot(c, state.to(c.dtype), input_precision="ieee") * tl.exp(logs)[:, None]
                answer = tl.dot(read.to(v.dtype), v, answer, input_precision="ieee") + skip * v
                tl.store(out_ptr + at * (HEADS * WIDTH) + values, answer.to(v.dtype), mask=real & there)
                state = add_tile(state, b, v * time[:, None], logs, mine)
            keep_state(states_ptr, table_ptr, rows, place_stride, part, inside, state, counts, done)
        write_state(states_ptr, table_ptr, rows, place_stride, part, inside, state)
        number += tl.num_programs(2)
        row = prompt_of(number, starts_ptr, rows)


def selective_scan(
    card: Card,
    x: Tensor,
    steps: Tensor,
    speeds: Tensor,
    shifts: Tensor,
    skips: Tensor,
    limits: tuple[float, float],
    states: Tensor,
    step: ForwardContext,
    groups: int,
) -> Tensor:
    _, heads, size, width = states.shape
    if x.stride(1) != 1 or steps.stride(1) != 1 or size > MOST_ROWS_OF_STATE:
        return recurrent_ops.selective_scan(x, steps, speeds, shifts, skips, limits, states, step, groups)
    out = torch.empty(len(x), heads * width, dtype=x.dtype, device=x.device)
    given = (x, steps, speeds, shifts, skips, states, out, *tables_of(step))
    strides, shape = (x.stride(0), steps.stride(0), states.stride(0)), (groups, heads, size, width)
    limit, prompts = kinds_of_rows(x, step)
    if prompts:
        tile, columns = tile_of(card, size, width)
        blocks = -(-width // columns)
        launch(
            scan_tiles,
            (blocks, heads, turns_of(prompts, blocks * heads, card)),
            *(*given, *strides, len(step.kv_lens), *limits, *shape, padded(size), columns, tile),
            num_warps=8,
            num_stages=3,
        )
    if limit:
        rows, columns, warps = slab_of(size, width)
        launch(
            scan,
            (len(step.kv_lens) + 1, heads, -(-width // columns)),
            *(*given, *strides, len(x), limit, *limits, *shape, rows, columns),
            num_warps=warps,
        )
    return out


def operations(card: Card) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""
    return {"selective_scan": partial(selective_scan, card)}
