"""The gated delta rule by Triton, token by token: for short rows. A state S [key dim, value dim] of a head
forgets by `decay`, then learns the value v of a token under its key k as far as it does not know it yet, and
is asked:

    S <- decay * S;  u = rate * (v - k S);  S <- S + k u;  out = q S

Columns of a state are independent of each other: a program holds some of one head in registers while all
tokens of a row pass, so a state is read and written once. Prompts are computed in tiles (`delta_tiles`).
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
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.recurrent.delta_tiles import key_head_of, learn_prompts
from worker.kernels.cuda.recurrent.sequences import (
    MOST_ROWS_OF_STATE,
    fill_with_zeros,
    keep_state,
    kept_counts,
    kinds_of_rows,
    read_state,
    read_token,
    slab_of,
    softplus,
    tables_of,
    tokens_of_row,
    write_state,
)


@triton.jit(do_not_specialize=["count", "limit"])
def learn(
    x_ptr, gates_ptr, speeds_ptr, shifts_ptr, states_ptr, out_ptr, starts_ptr, lens_ptr, table_ptr, x_stride,
    gates_stride, place_stride, count, limit, most_rate, KEY_HEADS: constexpr, HEADS: constexpr,
    KEY_DIM: constexpr, VALUE_DIM: constexpr, TAKES_TURNS: constexpr, KEYS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """Compute the tokens of one row, if they are fewer than `limit`, for some columns of one value head."""
    first, last, real = tokens_of_row(starts_ptr, count)  # pyright: ignore
    head = tl.program_id(1)
    key_head = key_head_of(head, KEY_HEADS, HEADS, TAKES_TURNS)
    key, column = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known, there = key < KEY_DIM, column < VALUE_DIM
    out_ptr += head * VALUE_DIM
    if real & (first < last) & (last - first < limit):
        at = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + column[None, :]
        inside = known[:, None] & there[None, :]
        row, rows = tl.program_id(0), tl.num_programs(0) - 1
        table_ptr += row
        length = tl.load(lens_ptr + row)
        state = read_state(states_ptr, table_ptr, length, last - first, place_stride, at, inside)
        counts = kept_counts(table_ptr, rows)
        speed, shift = tl.load(speeds_ptr + head), tl.load(shifts_ptr + head)
        x_ptr += first.to(tl.int64) * x_stride
        gates_ptr += first.to(tl.int64) * gates_stride + head
        out_ptr += first.to(tl.int64) * (HEADS * VALUE_DIM)
        keys, values = key_head * KEY_DIM + key, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        q, k, v = read_token(x_ptr, keys, values, known, there, KEY_HEADS * KEY_DIM)
        rate_gate, decay_gate = tl.load(gates_ptr).to(tl.float32), tl.load(gates_ptr + HEADS).to(tl.float32)
        for token in range(first, last):
            follows = token + 1 < last
            x_ptr += tl.where(follows, x_stride, 0)
            gates_ptr += tl.where(follows, gates_stride, 0)
            # What the next token needs is on its way while this one is computed.
            next_q, next_k, next_v = read_token(x_ptr, keys, values, known, there, KEY_HEADS * KEY_DIM)
            next_rate_gate = tl.load(gates_ptr).to(tl.float32)
            next_decay_gate = tl.load(gates_ptr + HEADS).to(tl.float32)
            q /= tl.sqrt((tl.sum(q * q, 0) + 1e-6) * KEY_DIM)
            k /= tl.sqrt(tl.sum(k * k, 0) + 1e-6)
            state *= tl.exp(speed * softplus(decay_gate + shift))
            learnt = (v - tl.sum(state * k[:, None], 0)) * (most_rate / (1.0 + tl.exp(-rate_gate)))
            state += k[:, None] * learnt[None, :]
            answer = tl.sum(state * q[:, None], 0)
            tl.store(out_ptr + column, answer.to(out_ptr.dtype.element_ty), mask=there)
            out_ptr += HEADS * VALUE_DIM
            done = token + 1 - first
            keep_state(states_ptr, table_ptr, rows, place_stride, at, inside, state, counts, done)
            q, k, v = next_q, next_k, next_v
            rate_gate, decay_gate = next_rate_gate, next_decay_gate
        write_state(states_ptr, table_ptr, rows, place_stride, at, inside, state)
    elif not real:
        fill_with_zeros(out_ptr, first, last, HEADS * VALUE_DIM, column, there)


def gated_delta(
    card: Card,
    x: Tensor,
    gates: Tensor,
    speeds: Tensor,
    shifts: Tensor,
    states: Tensor,
    step: ForwardContext,
    key_heads: int,
    takes_turns: bool = False,
    most_rate: float = 1.0,
) -> Tensor:
    _, heads, key_dim, value_dim = states.shape
    if x.stride(1) != 1 or gates.stride(1) != 1 or key_dim > MOST_ROWS_OF_STATE:
        return recurrent_ops.gated_delta(
            x, gates, speeds, shifts, states, step, key_heads, takes_turns, most_rate
        )
    out = torch.empty(len(x), heads * value_dim, dtype=x.dtype, device=x.device)
    given, options = (x, gates, speeds, shifts, states, out), (key_heads, takes_turns, most_rate)
    limit, prompts = kinds_of_rows(x, step)
    if prompts:
        learn_prompts(card, *given, step, prompts, *options)
    if limit:
        rows, columns, warps = slab_of(key_dim, value_dim)
        launch(
            learn,
            (len(step.kv_lens) + 1, heads, -(-value_dim // columns)),
            *(*given, *tables_of(step), x.stride(0), gates.stride(0), states.stride(0), len(x)),
            *(limit, most_rate, key_heads, heads, key_dim, value_dim, takes_turns, rows, columns),
            num_warps=warps,
        )
    return out


def operations(card: Card) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""
    return {"gated_delta": partial(gated_delta, card)}
