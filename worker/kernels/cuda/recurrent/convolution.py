"""Short convolutions by Triton, over the tokens of each sequence, which go on where the last step ended."""

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
from worker.kernels.cuda.recurrent.sequences import KEPT, goes_on, row_of_table, tables_of, tokens_of_row

_TOKENS, _CHANNELS = 16, 128


@triton.jit
def _inputs_at(
    x_ptr, past_ptr, at, there, count, continues, x_stride, CHANNELS: constexpr, PAST: constexpr
):  # fmt: skip
    """Some channels of the inputs of the tokens `at` of a row; negative ones are the PAST of its state."""
    new = tl.load(x_ptr + at.to(tl.int64) * x_stride, mask=(at >= 0) & (at < count) & there, other=0.0)
    old = tl.load(past_ptr + (at + PAST) * CHANNELS, mask=(at < 0) & continues & there, other=0.0)
    return tl.where(at >= 0, new.to(tl.float32), old)


@triton.jit(do_not_specialize=["count"])
def convolve(
    x_ptr, weight_ptr, bias_ptr, states_ptr, out_ptr, starts_ptr, lens_ptr, table_ptr, x_stride, place_stride,
    count, CHANNELS: constexpr, PAST: constexpr, FUNCTION: constexpr, HELD: constexpr, TOKENS: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Compute the tokens of one row, for some channels, and write the last inputs to its states.

    Tokens behind all rows are convolved as a sequence that begins, so that their results are finite.
    """
    first, last, real = tokens_of_row(starts_ptr, count)  # pyright: ignore
    count = last - first
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = channel < CHANNELS
    continues = goes_on(lens_ptr, first, last, real)
    past_ptr = states_ptr + row_of_table(table_ptr, 0, continues).to(tl.int64) * place_stride + channel
    x_ptr += first.to(tl.int64) * x_stride + channel
    out_ptr += first.to(tl.int64) * CHANNELS + channel
    for begin in range(0, count, TOKENS):
        token = begin + tl.arange(0, TOKENS)[:, None]
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channel, mask=there, other=0.0)
        for tap in tl.static_range(PAST + 1):
            at, weight_at = token + (tap - PAST), weight_ptr + tap * CHANNELS + channel
            inputs = _inputs_at(x_ptr, past_ptr, at, there, count, continues, x_stride, CHANNELS, PAST)
            total += inputs * tl.load(weight_at, mask=there, other=0.0)
        out = applied(total, FUNCTION).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * CHANNELS, out, mask=(token < count) & there)
    if real & (count > 0):
        slot = tl.arange(0, HELD)[:, None]
        inside = (slot < PAST) & there
        for each in tl.static_range(KEPT + 1):  # the place of the state after the step comes last
            if each < KEPT:
                done = row_of_table(table_ptr, 2 + 2 * each, real)
                place = row_of_table(table_ptr, 3 + 2 * each, real)
            else:
                done, place = count, row_of_table(table_ptr, 1, real)
            if done > 0:
                at, state_ptr = done + slot - PAST, states_ptr + place.to(tl.int64) * place_stride
                inputs = _inputs_at(x_ptr, past_ptr, at, inside, count, continues, x_stride, CHANNELS, PAST)
                tl.debug_barrier()  # all threads have read the state before, which may lie in this place
                tl.store(state_ptr + slot * CHANNELS + channel, inputs, mask=inside)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    step: ForwardContext,
    kind: str | None = None,
) -> Tensor:
    taps, channels = weight.shape
    if x.stride(1) != 1 or not (kind is None or kind in FUNCTIONS):
        return recurrent_ops.causal_conv(x, weight, bias, states, step, kind)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        convolve,
        (len(step.kv_lens) + 1, -(-channels // _CHANNELS)),
        *(x, weight, bias, states, out, *tables_of(step)),
        *(x.stride(0), states.stride(0), len(x)),
        *(channels, taps - 1, FUNCTIONS[kind] if kind else 0),
        *(1 << (taps - 2).bit_length(), _TOKENS, _CHANNELS),
        num_warps=4,
    )
    return out


OPERATIONS: dict[str, Callable[..., Any]] = {"causal_conv": causal_conv}
"""The operations of this module by name, for `models.ops.use`."""
