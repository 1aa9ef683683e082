"""The random draw of tokens in one Triton kernel: the rule of `worker/sampling/draw.py`, and the same tokens.

A program draws for one row, and reads its logits once for each round of a search; nothing of the width of the
vocabulary is written. A row's masses are exp((logit - largest) / temperature). A floor under them comes from
min_p, top_k and top_p, by bisection over the bits of float32; the token is where the running sum of what is
above the floor passes the row's point. Sums are float64 over pieces of BLOCK, so a token may differ from the
CPU's only where rounding decides.
"""

from __future__ import annotations

import logging

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from worker.kernels.cuda.launch import launch
from worker.sampling.draw import Draw, Draws, draw_fully
from worker.sampling.groups import BY_TORCH, GroupedLogits

logger = logging.getLogger(__name__)

_BLOCK = 2048


@triton.jit
def _masses(logits, start, width, peak, temperature, BLOCK: constexpr):
    """The masses [BLOCK] of a piece of the vocabulary; 0 past its end."""
    at = start + tl.arange(0, BLOCK)
    logit = tl.load(logits + at, mask=at < width, other=float("-inf"))
    return tl.exp((logit - peak) / temperature)


@triton.jit
def _peak(logits, width, BLOCK: constexpr):
    """The largest logit of a row."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(logits + at, mask=at < width, other=float("-inf")))
    return tl.max(largest, 0)


@triton.jit
def _above(logits, width, peak, temperature, floor, COUNTS: constexpr, BLOCK: constexpr):
    """The sum of the masses that are not under the floor, or their number."""
    total = tl.zeros([], tl.float64)
    for start in range(0, width, BLOCK):
        mass = _masses(logits, start, width, peak, temperature, BLOCK)
        if COUNTS:
            there = (mass >= floor) & (start + tl.arange(0, BLOCK) < width)
            total += tl.sum(there.to(tl.int32), 0).to(tl.float64)
        else:
            total += tl.sum(tl.where(mass >= floor, mass, 0.0).to(tl.float64), 0)
    return total


@triton.jit
def _search(logits, width, peak, temperature, low, goal, COUNTS: constexpr, BLOCK: constexpr):
    """The largest floor, at least `low`, that leaves the goal: positive floats are ordered as their bits."""
    least = tl.zeros([], tl.int32)
    most = least + 0x3F800001  # the bits of 1, and one more
    for _ in range(30):
        middle = (least + most) // 2
        floor = tl.maximum(low, middle.to(tl.float32, bitcast=True))
        enough = _above(logits, width, peak, temperature, floor, COUNTS, BLOCK) >= goal
        least = tl.where(enough, middle, least)
        most = tl.where(enough, most, middle)
    return tl.maximum(low, least.to(tl.float32, bitcast=True))


@triton.jit
def _pick(logits, width, peak, temperature, floor, target, BLOCK: constexpr):
    """The token at which the running sum of the masses passes `target`; else the last one above the floor."""
    before = tl.zeros([], tl.float64)
    found = tl.full([], -1, tl.int32)
    last = tl.zeros([], tl.int32)
    for start in range(0, width, BLOCK):
        if found < 0:
            at = start + tl.arange(0, BLOCK)
            mass = _masses(logits, start, width, peak, temperature, BLOCK)
            mass = tl.where((mass >= floor) & (at < width), mass, 0.0).to(tl.float64)
            passed = (before + tl.cumsum(mass, 0) > target) & (mass > 0)
            first = tl.min(tl.where(passed, at, 2147483647), 0)
            last = tl.maximum(last, tl.max(tl.where(mass > 0, at, 0), 0))
            found = tl.where(first < 2147483647, first, found)
            before += tl.sum(mass, 0)
    return tl.where(found >= 0, found, last)  # rounding may carry the target past the end


@triton.jit(do_not_specialize=["width"])
def draw_row(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, points_ptr, out_ptr, stride,
    width, BLOCK: constexpr,
):  # fmt: skip
    """Draw one token, if the row has a temperature.

    `points`: where in the sum of masses, in units of 2**-31; a top_k of 0 is off.
    """
    row = tl.program_id(0)
    logits = logits_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        return
    top_k, top_p, floor = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    peak = _peak(logits, width, BLOCK)
    if top_k > 0:
        count = tl.minimum(top_k, width).to(tl.float64)
        floor = _search(logits, width, peak, temperature, floor, count, True, BLOCK)
    total = _above(logits, width, peak, temperature, floor, False, BLOCK)
    if top_p < 1.0:
        goal = (top_p.to(tl.float64) * total).to(tl.float64)
        floor = _search(logits, width, peak, temperature, floor, goal, False, BLOCK)
        total = _above(logits, width, peak, temperature, floor, False, BLOCK)
    target = (tl.load(points_ptr + row).to(tl.float64) + 0.5) * 4.656612873077393e-10 * total
    tl.store(out_ptr + row, _pick(logits, width, peak, temperature, floor, target, BLOCK))


def open_draw(target: torch.device) -> Draw:
    """The draw by Triton if it draws the same tokens on this card as torch does, else that of torch."""
    made = torch.Generator().manual_seed(0)
    grouped = GroupedLogits(torch.randn(4, 1000, generator=made).to(target) * 3, BY_TORCH)
    sample = filters(target)
    if draw(grouped, sample).tolist() == draw_fully(grouped, sample).tolist():
        return draw
    logger.error("the draw of tokens differs from what it should compute on this card: torch does it")
    return draw_fully


def filters(target: torch.device) -> Draws:
    """Four rows, with one filter each or none."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).unsqueeze(1).to(target)

    return Draws(
        rows=torch.arange(4, dtype=torch.int32).to(target),
        temperature=column([1.0, 0.7, 1.3, 2.0], torch.float32),
        top_k=column([0, 20, 0, 0], torch.int32),
        top_p=column([1.0, 1.0, 0.9, 1.0], torch.float32),
        min_p=column([0.0, 0.0, 0.0, 0.1], torch.float32),
        points=column([1 << 30, 1 << 29, 1 << 28, 3 << 28], torch.int32),
        largest_k=20,
        has_min_p_or_top_k=True,
        has_top_p=True,
        bounded=False,
    )


def draw(logits: GroupedLogits, draws: Draws) -> Tensor:
    """The drawn tokens [N] int32. The logits stay as they are."""
    out = torch.empty(len(draws.rows), dtype=torch.int32, device=logits.logits.device)
    draw_into(logits, draws, out)
    return out


def draw_into(logits: GroupedLogits, draws: Draws, out: Tensor) -> None:
    """Write the drawn tokens to `out` [N] int32, but for rows without a temperature, which keep theirs."""
    launch(
        draw_row,
        (len(out),),
        *(
            logits.logits,
            draws.rows,
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            draws.points,
            out,
        ),
        *(logits.logits.stride(0), logits.vocab_size, _BLOCK),
        num_warps=16,
    )
