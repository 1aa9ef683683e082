"""The random draw of tokens in two Triton kernels, by the rule of `worker/sampling/top_k_top_p.py`.

A row's masses are exp((logit - largest) / temperature). The first kernel surveys them with a program for each
piece of each row, so that one row occupies many multiprocessors: of each group of 64 tokens it notes the
largest mass and the sum. In the second, one program for each row finds the token. What groups are known for
tells which of them can hold a floor (of min_p, top_k, top_p), and only these are read again, by a search over
the bits of float32; the token is where the running sum of what is above the floor passes the row's point.
Sums are float32 within a group and float64 over groups, so a token may differ from the CPU's only where
rounding decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from worker.kernels.cuda.launch import launch
from worker.sampling.grouped_logits import BY_TORCH, GROUP, GroupedLogits
from worker.sampling.top_k_top_p import Draws, draw_fully

_PIECE = 16
"""The groups that a program of the survey reads."""
_TILE = 64
"""The groups that a search reads at a time."""
PROVED = (4, 1000)
"""The rows and tokens of the draws that are compared with torch's before a model is loaded."""


@triton.jit
def _masses(logits, groups, there, peak, temperature, GROUP: constexpr):
    """The masses [N, GROUP] of groups [N]; 0 of those that are not there."""
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = tl.load(logits + at, mask=there[:, None], other=float("-inf"))
    return tl.exp((logit - peak) / temperature)


@triton.jit(do_not_specialize=["groups"])
def survey_groups(
    logits_ptr, best_ptr, rows_ptr, temperature_ptr, peaks_ptr, largest_ptr, sums_ptr, stride, groups,
    PIECE: constexpr, GROUP: constexpr,
):  # fmt: skip
    """Write the largest mass and the sum of each group of a piece, if the row has a temperature.

    `best`: the likeliest token of each row of logits. The largest logit is kept for the search, because drawn
    tokens may be written over `best`.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        return
    own = tl.load(rows_ptr + row).to(tl.int64)
    logits = logits_ptr + own * stride
    peak = tl.load(logits + tl.load(best_ptr + own))
    if tl.program_id(1) == 0:
        tl.store(peaks_ptr + row, peak)
    if not tl.abs(peak) < float("inf"):
        return
    piece = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    there = piece < groups
    mass = _masses(logits, piece, there, peak, temperature, GROUP)
    tl.store(largest_ptr + row * groups + piece, tl.max(mass, 1), mask=there)
    tl.store(sums_ptr + row * groups + piece, tl.sum(mass, 1), mask=there)


@triton.jit
def _bound(largest, sums, goal, COUNTS: constexpr, GROUP: constexpr):
    """A floor that leaves the goal, as high as can be told from groups [G] alone.

    As many groups as have their largest mass above a floor, so many masses are above it, at least; and of a
    group's sum, at most 63 masses are under the floor, each less than it.
    """
    bits = tl.zeros([], tl.int32)
    for digit in range(30):
        higher = bits | (tl.full([], 1 << 29, tl.int32) >> digit)
        floor = higher.to(tl.float32, bitcast=True)
        if COUNTS:
            least = tl.sum((largest >= floor).to(tl.int32), 0)
        else:
            least = tl.sum(tl.where(largest >= floor, sums - (GROUP - 1) * floor, 0.0), 0)
        bits = tl.where(least >= goal, higher, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _list(listed, largest, floor, GROUPS: constexpr):
    """List the groups [G] that have a mass above the floor, in their order, and return their number."""
    wanted = largest >= floor
    tl.debug_barrier()  # other threads may still read the list before
    place = tl.cumsum(wanted.to(tl.int32), 0) - 1
    tl.store(listed + place, tl.arange(0, GROUPS), mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), 0)


@triton.jit
def _search(
    logits, listed, count, peak, temperature, low, goal, COUNTS: constexpr, TILE: constexpr,
    GROUP: constexpr,
):  # fmt: skip
    """The largest floor, at least `low`, that leaves the goal: positive floats are ordered as their bits.

    Two bits are found at a time, by what the listed groups hold above three floors. The largest mass is 1,
    whose bits are fewer than 30. The goal is a number of masses, or a sum.
    """
    tile = tl.arange(0, TILE)
    bits = tl.zeros([], tl.int32)
    for digit in range(15):
        step = tl.full([], 1 << 28, tl.int32) >> (2 * digit)
        first = tl.maximum(low, (bits + step).to(tl.float32, bitcast=True))
        second = tl.maximum(low, (bits + 2 * step).to(tl.float32, bitcast=True))
        third = tl.maximum(low, (bits + 3 * step).to(tl.float32, bitcast=True))
        one = tl.zeros([TILE], tl.int32 if COUNTS else tl.float64)
        two, three = one, one
        for start in range(0, count, TILE):
            there = start + tile < count
            groups = tl.load(listed + start + tile, mask=there, other=0)
            mass = _masses(logits, groups, there, peak, temperature, GROUP)
            if COUNTS:
                one += tl.sum((mass >= first).to(tl.int32), 1)
                two += tl.sum((mass >= second).to(tl.int32), 1)
                three += tl.sum((mass >= third).to(tl.int32), 1)
            else:
                one += tl.sum(tl.where(mass >= first, mass, 0.0), 1).to(tl.float64)
                two += tl.sum(tl.where(mass >= second, mass, 0.0), 1).to(tl.float64)
                three += tl.sum(tl.where(mass >= third, mass, 0.0), 1).to(tl.float64)
        enough = (tl.sum(one, 0) >= goal).to(tl.int32) + (tl.sum(two, 0) >= goal).to(tl.int32)
        bits += step * (enough + (tl.sum(three, 0) >= goal).to(tl.int32))
    return tl.maximum(low, bits.to(tl.float32, bitcast=True))


@triton.jit
def _add_up(
    logits, listed, count, peak, temperature, floor, kept, known, TILE: constexpr, GROUP: constexpr
):  # fmt: skip
    """The sums of all groups [G] above a floor, which only the listed ones reach: those that are `kept`."""
    tile = tl.arange(0, TILE)
    for start in range(0, count, TILE):
        there = start + tile < count
        groups = tl.load(listed + start + tile, mask=there, other=0)
        mass = _masses(logits, groups, there, peak, temperature, GROUP)
        tl.store(known + groups, tl.sum(tl.where(mass >= floor, mass, 0.0), 1), mask=there)
    tl.debug_barrier()
    return tl.load(known + tl.arange(0, kept.shape[0]), mask=kept, other=0.0)


@triton.jit
def _pass(running, held, target):
    """The first place [N] that holds something and whose running sum passes the target; else the last one."""
    at = tl.arange(0, held.shape[0])
    first = tl.min(tl.where((running > target) & (held > 0), at, held.shape[0]), 0)
    last = tl.max(tl.where(held > 0, at, 0), 0)  # rounding may carry the target past the end
    return tl.where(first < held.shape[0], first, last)


@triton.jit
def _pick(logits, sums, point, peak, temperature, floor, GROUP: constexpr):
    """The token at the point, in units of 2**-31 of what all groups [G] hold above the floor."""
    sums = sums.to(tl.float64)
    target = (point.to(tl.float64) + 0.5) * 4.656612873077393e-10 * tl.sum(sums, 0)
    group = _pass(tl.cumsum(sums, 0), sums, target)
    before = tl.sum(tl.where(tl.arange(0, sums.shape[0]) < group, sums, 0.0), 0)
    at = group * GROUP + tl.arange(0, GROUP)
    mass = tl.exp((tl.load(logits + at) - peak) / temperature)
    mass = tl.where(mass >= floor, mass, 0.0).to(tl.float64)
    return group * GROUP + _pass(before + tl.cumsum(mass, 0), mass, target)


@triton.jit(do_not_specialize=["groups"])
def draw_row(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, points_ptr, peaks_ptr,
    largest_ptr, sums_ptr, listed_ptr, out_ptr, stride, groups, GROUPS: constexpr, TILE: constexpr,
    GROUP: constexpr,
):  # fmt: skip
    """Draw one token, if the row has a temperature. Logits that are not finite give the first token.

    `points`: where in the sum of masses, in units of 2**-31; a top_k of 0 is off. GROUPS: a power of two that
    is not less than `groups`.
    """
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        return
    peak, point = tl.load(peaks_ptr + row), tl.load(points_ptr + row)
    if not tl.abs(peak) < float("inf"):
        tl.store(out_ptr + row, 0)
        return
    top_k, top_p, floor = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    at, listed, known = tl.arange(0, GROUPS), listed_ptr + row * groups, sums_ptr + row * groups
    largest = tl.load(largest_ptr + row * groups + at, mask=at < groups, other=-1.0)
    sums = tl.load(known + at, mask=at < groups, other=0.0)
    low = floor  # the listed groups are those with a mass of at least this
    if (top_k > 0) | (floor > 0):
        if top_k > 0:
            low = tl.maximum(low, _bound(largest, sums, top_k, True, GROUP))
        count = _list(listed, largest, low, GROUPS)
        if top_k > 0:
            floor = _search(logits, listed, count, peak, temperature, floor, top_k, True, TILE, GROUP)
        sums = _add_up(logits, listed, count, peak, temperature, floor, largest >= low, known, TILE, GROUP)
    if top_p < 1.0:
        goal = top_p.to(tl.float64) * tl.sum(sums.to(tl.float64), 0)
        # What is a bound in float32 is one in float64 if it leaves a little more.
        low = tl.maximum(low, _bound(largest, sums, (1.0001 * goal).to(tl.float32), False, GROUP))
        count = _list(listed, largest, low, GROUPS)
        floor = _search(logits, listed, count, peak, temperature, floor, goal, False, TILE, GROUP)
        sums = _add_up(logits, listed, count, peak, temperature, floor, largest >= low, known, TILE, GROUP)
    tl.store(out_ptr + row, _pick(logits, sums, point, peak, temperature, floor, GROUP))


def draws_right(target: torch.device) -> bool:
    """Whether Triton draws the same tokens on this card as torch does."""
    made = torch.Generator().manual_seed(0)
    grouped = GroupedLogits(torch.randn(PROVED, generator=made).to(target) * 3, BY_TORCH)
    sample = filters(target)
    return draw(grouped, sample).tolist() == draw_fully(grouped, sample).tolist()


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
    """Write the drawn tokens to `out` [N] int32, but for rows without a temperature, which keep theirs.

    `out` may be the likeliest tokens of these logits, if the rows are in their order.
    """
    count, groups = len(out), logits.logits.shape[1] // GROUP
    target = logits.logits.device
    # Each has memory of its own: kernels are compiled for pointers that 16 divides.
    peaks = torch.empty(count, device=target)
    largest = torch.empty(count, groups, device=target)
    sums = torch.empty_like(largest)
    listed = torch.empty(count, groups, dtype=torch.int32, device=target)
    stride = logits.logits.stride(0)
    launch(
        survey_groups,
        (count, -(-groups // _PIECE)),
        *(logits.logits, logits.best, draws.rows, draws.temperature, peaks, largest, sums),
        *(stride, groups, _PIECE, GROUP),
        num_warps=4,
    )
    launch(
        draw_row,
        (count,),
        *(logits.logits, draws.rows, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.points),
        *(peaks, largest, sums, listed, out),
        *(stride, groups, triton.next_power_of_2(groups), _TILE, GROUP),
        num_warps=16,
    )
