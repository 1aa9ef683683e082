"""Short convolutions by Triton, over the tokens of each sequence, which go on where the last step ended.

A program computes some tokens of a step, whatever rows they belong to, all at once.
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
from worker.kernels.cuda.linear import FUNCTIONS, applied
from worker.kernels.cuda.recurrent.sequences import KEPT, rows_of, tables_of

_TOKENS, _CHANNELS = 32, 64


@triton.jit
def _new_inputs(x_ptr, at, count, asked, x_stride):
    """The inputs of tokens `at` [N, 1] of rows of `count` tokens, and 0 for those of a state."""
    asked = asked & (at >= 0) & (at < count)
    return tl.load(x_ptr + at.to(tl.int64) * x_stride, mask=asked, other=0.0).to(tl.float32)


@triton.jit
def _old_inputs(past_ptr, at, asked, CHANNELS: constexpr, PAST: constexpr):
    """The inputs of tokens `at` [N, 1] before a step, of which a state has PAST; 0 for others."""
    return tl.load(past_ptr + (at + PAST) * CHANNELS, mask=asked & (at < 0), other=0.0)


@triton.jit
def _write_states(
    x_ptr, past_ptr, states_ptr, table_ptr, begins, there, new, continues, x_stride, place_stride, rows,
    CHANNELS: constexpr, PAST: constexpr,
):  # fmt: skip
    """Write the last inputs of rows wherever they are to be kept, if their first tokens are these [N, 1]."""
    # The place of the state after the step comes last.
    for each in tl.static_range(KEPT + 1):  # pyright: ignore
        if each < KEPT:
            done = tl.load(table_ptr + (2 + 2 * each) * rows, mask=begins, other=0)
            place = tl.load(table_ptr + (3 + 2 * each) * rows, mask=begins, other=0)
        else:
            done, place = new, tl.load(table_ptr + rows, mask=begins, other=0)
        state_ptr = states_ptr + place.to(tl.int64) * place_stride
        wanted = begins & (done > 0) & there
        for slot in tl.static_range(PAST):  # pyright: ignore
            at = done + (slot - PAST)
            inputs = _new_inputs(x_ptr, at, new, wanted, x_stride)
            old = _old_inputs(past_ptr, at, wanted & continues, CHANNELS, PAST)
            inputs = tl.where(at < 0, old, inputs)
            tl.debug_barrier()  # all threads have read this slot of the state before, which may lie here
            tl.store(state_ptr + slot * CHANNELS, inputs, mask=wanted)


@triton.jit(do_not_specialize=["count", "rows"])
def convolve(
    x_ptr, weight_ptr, bias_ptr, states_ptr, out_ptr, starts_ptr, lens_ptr, table_ptr, x_stride, place_stride,
    count, rows, CHANNELS: constexpr, PAST: constexpr, FUNCTION: constexpr, TOKENS: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Compute some channels of some tokens of any rows, and write states of the rows that begin among them.

    The first PAST tokens of a row need its state, so the program of its first token computes them all, and
    nobody else reads the state that it writes. Tokens behind all rows are convolved as a sequence that
    begins, so that their results are finite.
    """
    apart: constexpr = TOKENS - PAST + 1  # the tokens from program to program
    begin = tl.program_id(1) * apart
    token = begin + tl.arange(0, TOKENS)
    row = rows_of(token, starts_ptr, rows)[:, None]
    token = token[:, None]
    real = row < rows
    first = tl.load(starts_ptr + row)
    new = tl.where(real, tl.load(starts_ptr + row + 1, mask=real, other=0), count) - first
    continues = real & (tl.load(lens_ptr + row, mask=real, other=0) > new)
    source = tl.load(table_ptr + row, mask=continues, other=0).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = channel < CHANNELS
    x_ptr += first.to(tl.int64) * x_stride + channel
    past_ptr = states_ptr + source * place_stride + channel
    number = token - first
    home = tl.where(number < PAST, first, token)
    own = (number < new) & (home >= begin) & (home < begin + apart)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=there, other=0.0)
    weights = weight_ptr + channel
    remembered = own & continues & (number < PAST)
    if tl.max(remembered.to(tl.int32)) > 0:
        for tap in tl.static_range(PAST):
            inputs = _old_inputs(past_ptr, number + (tap - PAST), remembered & there, CHANNELS, PAST)
            total += inputs * tl.load(weights + tap * CHANNELS, mask=there, other=0.0)
    for tap in tl.static_range(PAST + 1):
        inputs = _new_inputs(x_ptr, number + (tap - PAST), new, own & there, x_stride)
        total += inputs * tl.load(weights + tap * CHANNELS, mask=there, other=0.0)
    out = applied(total, FUNCTION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * CHANNELS + channel, out, mask=own & there)
    begins = real & (number == 0) & (token < begin + apart)
    if tl.max(begins.to(tl.int32)) > 0:
        _write_states(
            x_ptr, past_ptr, states_ptr + channel, table_ptr + row, begins, there, new, continues, x_stride,
            place_stride, rows, CHANNELS, PAST,
        )  # fmt: skip


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    step: ForwardContext,
    kind: str | None = None,
) -> Tensor:
    taps, channels = weight.shape
    known = 1 < taps < _TOKENS and (kind is None or kind in FUNCTIONS)
    if x.stride(1) != 1 or not known:
        return recurrent_ops.causal_conv(x, weight, bias, states, step, kind)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        convolve,
        (-(-channels // _CHANNELS), -(-len(x) // (_TOKENS - taps + 2))),
        *(x, weight, bias, states, out, *tables_of(step)),
        *(x.stride(0), states.stride(0), len(x), len(step.kv_lens)),
        *(channels, taps - 1, FUNCTIONS[kind] if kind else 0, _TOKENS, _CHANNELS),
        num_warps=4,
    )
    return out


OPERATIONS: dict[str, Callable[..., Any]] = {"causal_conv": causal_conv}
"""The operations of this module by name, for `models.ops.use`."""
