"""The random draw of tokens in Triton kernels, by the rule of `worker/sampling/top_k_top_p.py`.

A row's masses are exp((logit - largest) / temperature). First all of them are surveyed, with a program for
each piece of each row, so that one row occupies many multiprocessors (`draw_survey.py`). Then one program for
each row finds the token. For a top_k, what groups are known for tells which of them can hold the floor, and
only these are read again, by a search over the bits of float32. For a top_p alone, the floor is searched in
the list of a window. The token is where the running sum of what is above the floor passes the row's
point. Sums are float32 within a group and float64 over groups, so a token may differ from the CPU's only
where rounding decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from worker.kernels.cuda.draw_survey import masses_of, narrow, survey_groups
from worker.kernels.cuda.launch import launch
from worker.sampling.grouped_logits import BY_TORCH, GROUP, GroupedLogits
from worker.sampling.top_k_top_p import Draws, draw_fully

_PIECE = 64
"""The groups that a program of the survey reads."""
_BINS, _ROOM = 64, 8192
"""The parts in which masses of a window are counted, and the masses of a row that may be listed."""
_TILE = 64
"""The groups that a search reads at a time."""
PROVED = (4, 1000)
"""The rows and tokens of the draws that are compared with torch's before a model is loaded."""


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
def _over(mass, floor, COUNTS: constexpr):
    """How many of masses [TILE, GROUP] a floor leaves in each group, or their sums."""
    if COUNTS:
        return tl.sum((mass >= floor).to(tl.int32), 1)
    else:
        return tl.sum(tl.where(mass >= floor, mass, 0.0), 1).to(tl.float64)


@triton.jit
def _search(
    logits, listed, count, peak, temperature, low, goal, COUNTS: constexpr, TILE: constexpr,
    GROUP: constexpr,
):  # fmt: skip
    """The largest floor, at least `low`, that leaves the goal: positive floats are ordered as their bits.

    Two bits are found at a time, by what the listed groups hold above three floors; the first groups stay in
    registers. The largest mass is 1, whose bits are fewer than 30. The goal is a number of masses, or a sum.
    """
    tile = tl.arange(0, TILE)
    groups = tl.load(listed + tile, mask=tile < count, other=0)
    held = masses_of(logits, groups, tile < count, peak, temperature, GROUP)
    bits = tl.zeros([], tl.int32)
    for digit in range(15):
        step = tl.full([], 1 << 28, tl.int32) >> (2 * digit)
        first = tl.maximum(low, (bits + step).to(tl.float32, bitcast=True))
        second = tl.maximum(low, (bits + 2 * step).to(tl.float32, bitcast=True))
        third = tl.maximum(low, (bits + 3 * step).to(tl.float32, bitcast=True))
        one, two, three = _over(held, first, COUNTS), _over(held, second, COUNTS), _over(held, third, COUNTS)
        for start in range(TILE, count, TILE):
            there = start + tile < count
            groups = tl.load(listed + start + tile, mask=there, other=0)
            mass = masses_of(logits, groups, there, peak, temperature, GROUP)
            one += _over(mass, first, COUNTS)
            two += _over(mass, second, COUNTS)
            three += _over(mass, third, COUNTS)
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
        mass = masses_of(logits, groups, there, peak, temperature, GROUP)
        tl.store(known + groups, tl.sum(tl.where(mass >= floor, mass, 0.0), 1), mask=there)
    tl.debug_barrier()
    return tl.load(known + tl.arange(0, kept.shape[0]), mask=kept, other=0.0)


@triton.jit
def _halve(listed, window, held, goal, SIZE: constexpr):
    """The largest floor in a window that leaves the goal of the masses that are listed.

    Masses of a window are alike, so their sums in float64 are exact, in whatever order. If what lies between
    the ends is less than twice the lower one it is a single mass, which is the floor.
    """
    at, low, high = tl.arange(0, SIZE), tl.load(window), tl.load(window + 1)
    mass = tl.load(listed + at, mask=at < held, other=0.0)
    most = tl.sum(mass.to(tl.float64), 0)
    least = most * 0.0
    while (high - low > 1) & (most - least >= 2 * low.to(tl.float32, bitcast=True).to(tl.float64)):
        middle = low + (high - low) // 2
        floor = middle.to(tl.float32, bitcast=True)
        left = tl.sum(tl.where(mass >= floor, mass, 0.0).to(tl.float64), 0)
        enough = left >= goal
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        most, least = tl.where(enough, left, most), tl.where(enough, least, left)
    single, low_floor = (most - least).to(tl.float32), low.to(tl.float32, bitcast=True)
    return tl.where((high - low > 1) & (most > least), single, low_floor)


@triton.jit
def _search_list(listed, window, held, goal, ROOM: constexpr):
    """The same, with as many registers as the list needs."""
    if held <= ROOM // 4:
        floor = _halve(listed, window, held, goal, ROOM // 4)
    else:
        floor = _halve(listed, window, held, goal, ROOM)
    return floor


@triton.jit
def _add_list(listed, places, there, floor, sums, SLICE: constexpr):
    """The sums of pieces [PIECES], and what each has above the floor in the list besides."""
    begin, held = tl.load(places, mask=there, other=0), tl.load(places + 1, mask=there, other=0)
    for start in range(0, tl.max(held, 0), SLICE):
        slot = start + tl.arange(0, SLICE)[None, :]
        mass = tl.load(listed + begin[:, None] + slot, mask=slot < held[:, None], other=0.0)
        sums += tl.sum(tl.where(mass >= floor, mass, 0.0).to(tl.float64), 1)
    return sums


@triton.jit
def _pass(running, held, target):
    """The first place [N] that holds something and whose running sum passes the target; else the last one."""
    at = tl.arange(0, held.shape[0])
    first = tl.min(tl.where((running > target) & (held > 0), at, held.shape[0]), 0)
    last = tl.max(tl.where(held > 0, at, 0), 0)  # rounding may carry the target past the end
    return tl.where(first < held.shape[0], first, last)


@triton.jit
def _find(sums, before, target):
    """The place [N] where a running sum that begins at `before` passes the target, and the sum before it."""
    place = _pass(before + tl.cumsum(sums, 0), sums, target)
    return place, before + tl.sum(tl.where(tl.arange(0, sums.shape[0]) < place, sums, 0.0), 0)


@triton.jit
def _target(sums, point):
    """The point, in units of 2**-31 of all sums [N], as a running sum."""
    return (point.to(tl.float64) + 0.5) * 4.656612873077393e-10 * tl.sum(sums, 0)


@triton.jit
def _pick(logits, group, before, target, peak, temperature, floor, GROUP: constexpr):
    """The token of a group where the running sum passes the target."""
    mass = tl.exp((tl.load(logits + group * GROUP + tl.arange(0, GROUP)) - peak) / temperature)
    mass = tl.where(mass >= floor, mass, 0.0).to(tl.float64)
    return group * GROUP + _find(mass, before, target)[0]


@triton.jit
def _sums_above(
    logits, largest_ptr, known, listed, peak, temperature, floor, top_k, top_p, groups, GROUPS: constexpr,
    TILE: constexpr, GROUP: constexpr,
):  # fmt: skip
    """The floor of top_k and top_p over min_p, and the sums of all groups [G] above it, by one program."""
    at = tl.arange(0, GROUPS)
    largest = tl.load(largest_ptr + at, mask=at < groups, other=-1.0)
    sums = tl.load(known + at, mask=at < groups, other=0.0)
    low = floor  # the listed groups are those with a mass of at least this
    if top_k > 0:
        low = tl.maximum(low, _bound(largest, sums, top_k, True, GROUP))
        count = _list(listed, largest, low, GROUPS)
        floor = _search(logits, listed, count, peak, temperature, floor, top_k, True, TILE, GROUP)
        sums = _add_up(logits, listed, count, peak, temperature, floor, largest >= low, known, TILE, GROUP)
    if top_p < 1.0:
        goal = top_p.to(tl.float64) * tl.sum(sums.to(tl.float64), 0)
        # What is a bound in float32 is one in float64 if it leaves a little more.
        low = tl.maximum(low, _bound(largest, sums, (1.0001 * goal).to(tl.float32), False, GROUP))
        count = _list(listed, largest, low, GROUPS)
        floor = _search(logits, listed, count, peak, temperature, floor, goal, False, TILE, GROUP)
        sums = _add_up(logits, listed, count, peak, temperature, floor, largest >= low, known, TILE, GROUP)
    return floor, sums.to(tl.float64)


@triton.jit(do_not_specialize=["groups"])
def draw_row(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, points_ptr, peaks_ptr,
    largest_ptr, sums_ptr, totals_ptr, lines_ptr, places_ptr, within_ptr, listed_ptr, out_ptr, stride,
    groups, GROUPS: constexpr, TILE: constexpr, PIECE: constexpr, BINS: constexpr, ROOM: constexpr,
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
    count: constexpr = (GROUPS + PIECE - 1) // PIECE
    pieces, piece = (groups + PIECE - 1) // PIECE, tl.arange(0, count)
    totals, there, step = totals_ptr + row * pieces, piece < pieces, tl.num_programs(0)
    windowed, window = (top_k == 0) & (top_p < 1.0), lines_ptr + row * (BINS + 4) + BINS
    again = (tl.load(window + 2, mask=windowed, other=0) > ROOM).to(tl.int32)  # the first is not listed
    window += again * step * (BINS + 4)
    held = tl.load(window + 2, mask=windowed, other=0)
    if (top_k > 0) | (held > ROOM):
        floor, sums = _sums_above(  # pyright: ignore
            logits, largest_ptr + row * groups, sums_ptr + row * groups, listed_ptr + row * groups, peak,
            temperature, floor, top_k, top_p, groups, GROUPS, TILE, GROUP,
        )  # fmt: skip
        target = _target(sums, point)
        group, before = _find(sums, 0.0, target)
    else:
        kept = tl.load(totals + piece, mask=there, other=0.0)
        if top_p < 1.0:
            goal = top_p.to(tl.float64) * tl.sum(kept, 0)
            kept = tl.load(totals + (1 + again) * step * pieces + piece, mask=there, other=0.0)
            within = within_ptr + row * ROOM
            floor = tl.maximum(floor, _search_list(within, window, held, goal - tl.sum(kept, 0), ROOM))
            kept = _add_list(within, places_ptr + 2 * (row * pieces + piece), there, floor, kept, TILE)
        target = _target(kept, point)
        number, before = _find(kept, 0.0, target)
        each = number * PIECE + tl.arange(0, PIECE)
        mass = masses_of(logits, each, each < groups, peak, temperature, GROUP)
        group, before = _find(_over(mass, floor, False), before, target)
        group += number * PIECE
    tl.store(out_ptr + row, _pick(logits, group, before, target, peak, temperature, floor, GROUP))


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
    pieces, powers = -(-groups // _PIECE), triton.next_power_of_2(groups)
    most_pieces = -(-powers // _PIECE)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(count, *shape, dtype=dtype, device=target)

    # Each has memory of its own: kernels are compiled for pointers that 16 divides.
    windowed = draws.has_top_p and not draws.bounded
    peaks, largest, sums, listed = empty(), empty(groups), empty(groups), empty(groups, dtype=torch.int32)
    totals = torch.empty(4, count, pieces, dtype=torch.float64, device=target)
    lines = (torch.zeros if windowed else torch.empty)(2, count, _BINS + 4, dtype=torch.int32, device=target)
    within, places = empty(_ROOM), empty(pieces, 2, dtype=torch.int32)
    stride = logits.logits.stride(0)
    filters = draws.temperature, draws.top_k, draws.top_p, draws.min_p
    launch(
        survey_groups,
        (count, pieces),
        *(logits.logits, logits.best, draws.rows, *filters, peaks, largest, sums, totals, lines),
        *(stride, groups, _PIECE, _BINS, GROUP),
        num_warps=8,
    )
    for last in (False, True) if windowed else ():
        launch(
            narrow,
            (count, pieces),
            *(logits.logits, draws.rows, *filters, peaks, largest, totals, lines, places, within),
            *(stride, groups, last, _ROOM, most_pieces, _PIECE, _BINS, GROUP),
            num_warps=8,
        )
    launch(
        draw_row,
        (count,),
        *(logits.logits, draws.rows, *filters, draws.points, peaks, largest, sums),
        *(totals, lines, places, within, listed, out),
        *(stride, groups, powers, _TILE, _PIECE, _BINS, _ROOM, GROUP),
        num_warps=16,
        **({"maxnreg": 128} if powers <= 2048 else {}),  # or it spills registers to hold more programs
    )
