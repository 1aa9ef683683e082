"""The selective scan of Mamba-2 by Triton, token by token. A state S [size, width] of a head forgets by
`decay`, then adds the values v of a token, times its time step, under the keys b of the head's group, and is
read by their queries c:

    S <- decay * S + b (time * v);  out = c S + skip * v

Columns of a state are independent of each other: a program holds some of one head in registers while all
tokens of a row pass, so a state is read and written once. Prompts and single tokens are computed alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.context import ForwardContext
from models.ops import recurrent_ops
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.recurrent.sequences import (
    MOST_ROWS_OF_STATE,
    fill_with_zeros,
    goes_on,
    keep_state,
    kept_counts,
    read_state,
    read_token,
    slab_of,
    softplus,
    tables_of,
    tokens_of_row,
    write_state,
)


@triton.jit(do_not_specialize=["count"])
def scan(
    x_ptr, steps_ptr, speeds_ptr, shifts_ptr, skips_ptr, states_ptr, out_ptr, starts_ptr, lens_ptr, table_ptr,
    x_stride, steps_stride, place_stride, count, least, most, GROUPS: constexpr, HEADS: constexpr,
    SIZE: constexpr, WIDTH: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """Compute the tokens of one row, for some columns of one head."""
    first, last, real = tokens_of_row(starts_ptr, count)  # pyright: ignore
    head = tl.program_id(1)
    key, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known, there = key < SIZE, column < WIDTH
    out_ptr += head * WIDTH
    if real & (first < last):
        at = head * SIZE * WIDTH + key[:, None] * WIDTH + column[None, :]
        inside = known[:, None] & there[None, :]
        continues = goes_on(lens_ptr, first, last, real)
        state = read_state(states_ptr, table_ptr, place_stride, at, inside, continues)
        counts = kept_counts(table_ptr, real)
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
            keep_state(states_ptr, table_ptr, place_stride, at, inside, state, counts, done)
            b, c, v, step = next_b, next_c, next_v, next_step
        write_state(states_ptr, table_ptr, place_stride, at, inside, state)
    else:
        fill_with_zeros(out_ptr, first, last, HEADS * WIDTH, column, there)


def selective_scan(
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
    rows, columns, warps = slab_of(size, width)
    launch(
        scan,
        (len(step.kv_lens) + 1, heads, -(-width // columns)),
        *(x, steps, speeds, shifts, skips, states, out, *tables_of(step)),
        *(x.stride(0), steps.stride(0), states.stride(0), len(x), *limits),
        *(groups, heads, size, width, rows, columns),
        num_warps=warps,
    )
    return out


OPERATIONS: dict[str, Callable[..., Any]] = {"selective_scan": selective_scan}
"""The operations of this module by name, for `models.ops.use`."""
