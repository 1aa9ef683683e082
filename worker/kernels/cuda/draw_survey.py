"""Surveys each row of logits on all multiprocessors before its token is drawn, in Triton.

`survey_groups` reads all masses once. For a row with a top_p and no top_k, `narrow` then says between which
two numbers the floor lies, which are the closer the more masses lie there. A program counts the masses of its
piece in BINS parts of the window before. So how much mass lies above each part is known within the width of
a part, and how much lies under it, too: the closer of the two tells. A window that holds no more than ROOM
masses has them written down for the search, in whatever order; one that holds more is narrowed once more.
Whatever lies above a window is added up, not counted, so nothing of the floor depends on how it was found.

A window is two numbers of 31 bits, those of a float32 that is in it and of one above it: positive floats are
ordered as their bits. What is found out of a row lies in a line of numbers: the counts, the two ends of the
window, the number of masses within, and how many of these are written down.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def masses_of(logits, groups, there, peak, temperature, GROUP: constexpr):
    """The masses [N, GROUP] of groups [N]; 0 of those that are not there."""
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = tl.load(logits + at, mask=there[:, None], other=float("-inf"))
    return tl.exp((logit - peak) / temperature)


@triton.jit
def _first_window():
    """The ends of the survey's window, all masses, and where its second part begins to be measured from.

    The 64 parts are halves of octaves from 2**-32 to 1; the first also has what is less.
    """
    return tl.full([], 1, tl.int32), tl.full([], 0x2F800001, tl.int32), tl.full([], 0x3F800001, tl.int32)


@triton.jit
def _part_shift(base, high, BINS: constexpr):
    """The bits of the numbers within a part, so that a window has no more than BINS parts."""
    return tl.sum(((high - base - 1) >> tl.arange(0, 32) >= BINS).to(tl.int32), 0)


@triton.jit
def _count(counts, mass, low, base, high, BINS: constexpr):
    """Add to the row's counts how many masses [N, GROUP] lie in each part [BINS] of a window."""
    mass = tl.reshape(mass, [mass.shape[0] * mass.shape[1]], can_reorder=True)
    bits = mass.to(tl.int32, bitcast=True)
    within = (bits >= low) & (bits < high)
    part = tl.where(within, tl.maximum(bits - base, 0), 0) >> _part_shift(base, high, BINS)
    found = tl.histogram(part, BINS, mask=within)
    tl.atomic_add(counts + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")


@triton.jit
def _narrowed(counts, above, upto, low, base, high, goal, BINS: constexpr):
    """The window within another whose parts have such counts [BINS], and how many masses it holds.

    `above` and `upto` are the sums of all masses over the window and from its lower end on. Bounds leave room
    for how sums are rounded.
    """
    part = tl.arange(0, BINS)
    number = tl.load(counts + part)
    shift = _part_shift(base, high, BINS)
    lower = tl.where(part == 0, low, base + (part << shift)).to(tl.float32, bitcast=True).to(tl.float64)
    upper = (base + ((part + 1) << shift)).to(tl.float32, bitcast=True).to(tl.float64)
    least, most = number * lower, number * upper
    enough = above + tl.cumsum(least, 0, reverse=True) >= 1.000001 * goal
    enough = enough | (upto - (tl.cumsum(most, 0) - most) >= 1.000001 * goal)
    perhaps = above + tl.cumsum(most, 0, reverse=True) >= 0.999999 * goal
    perhaps = perhaps & (upto - (tl.cumsum(least, 0) - least) >= 0.999999 * goal)
    first = tl.maximum(tl.sum(enough.to(tl.int32), 0) - 1, 0)
    end = tl.maximum(tl.sum(perhaps.to(tl.int32), 0), first + 1)
    held = tl.sum(tl.where((part >= first) & (part < end), number, 0), 0)
    low = tl.where(first == 0, low, base + (first << shift))
    return low, tl.minimum(high, base + (end << shift)), held


@triton.jit
def sum_of(pieces_ptr, pieces, PIECES: constexpr):
    """The sum of what the pieces of a row have."""
    piece = tl.arange(0, PIECES)
    return tl.sum(tl.load(pieces_ptr + piece, mask=piece < pieces, other=0.0), 0)


@triton.jit(do_not_specialize=["groups"])
def survey_groups(
    logits_ptr, best_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr,
    largest_ptr, sums_ptr, totals_ptr, lines_ptr, stride, groups, PIECE: constexpr, BINS: constexpr,
    GROUP: constexpr,
):  # fmt: skip
    """Write the largest mass and the sum of each group of a piece, if the row has a temperature.

    Sums are those of masses that min_p leaves. `best`: the likeliest token of each row of logits. The largest
    logit is kept for the search, because drawn tokens may be written over `best`.
    """
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        return
    own = tl.load(rows_ptr + row).to(tl.int64)
    logits = logits_ptr + own * stride
    peak = tl.load(logits + tl.load(best_ptr + own))
    if number == 0:
        tl.store(peaks_ptr + row, peak)
    if not tl.abs(peak) < float("inf"):
        return
    piece = number * PIECE + tl.arange(0, PIECE)
    there = piece < groups
    mass = masses_of(logits, piece, there, peak, temperature, GROUP)
    tl.store(largest_ptr + row * groups + piece, tl.max(mass, 1), mask=there)
    mass = tl.where(mass >= tl.load(min_p_ptr + row), mass, 0.0)
    sums = tl.sum(mass, 1)
    tl.store(sums_ptr + row * groups + piece, sums, mask=there)
    place = row * tl.num_programs(1) + number
    tl.store(totals_ptr + place, tl.sum(sums.to(tl.float64), 0))
    if (tl.load(top_p_ptr + row) < 1.0) & (tl.load(top_k_ptr + row) == 0):
        low, base, high = _first_window()
        _count(lines_ptr + row * (BINS + 4), mass, low, base, high, BINS)


@triton.jit
def _masses_from(logits, largest, piece, groups, low, peak, temperature, least, GROUP: constexpr):
    """The masses [N, GROUP] of a piece of groups [N] that min_p leaves, but for groups under a window."""
    there = piece < groups
    most = tl.load(largest + piece, mask=there, other=0.0).to(tl.int32, bitcast=True)
    mass = masses_of(logits, piece, there & (most >= low), peak, temperature, GROUP)
    return tl.where(mass >= least, mass, 0.0)


@triton.jit
def _add_from(out, mass, edge):
    """Write the sum of masses [N, GROUP] that are no less than an edge."""
    over = tl.where(mass.to(tl.int32, bitcast=True) >= edge, mass, 0.0)
    tl.store(out, tl.sum(tl.sum(over, 1).to(tl.float64), 0))


@triton.jit
def _list_within(listed, used, place, mass, low, high, ROOM: constexpr):
    """List the masses [N, GROUP] of a window behind those that are listed, whose number is at `used`."""
    mass = tl.reshape(mass, [mass.shape[0] * mass.shape[1]], can_reorder=True)
    bits = mass.to(tl.int32, bitcast=True)
    within = ((bits >= low) & (bits < high)).to(tl.int32)
    own = tl.sum(within, 0)
    begin = tl.atomic_add(used, own, sem="relaxed")
    slot = begin + tl.cumsum(within, 0) - 1
    tl.store(listed + slot, mass, mask=(within > 0) & (slot < ROOM))
    tl.store(place, begin)
    tl.store(place + 1, own)


@triton.jit(do_not_specialize=["groups"])
def narrow(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, largest_ptr,
    totals_ptr, lines_ptr, places_ptr, listed_ptr, stride, groups, LAST: constexpr, ROOM: constexpr,
    PIECES: constexpr, PIECE: constexpr, BINS: constexpr, GROUP: constexpr,
):  # fmt: skip
    """Write a narrower window for the floor of a row's top_p, and what a piece has above and within it.

    If few masses lie within it they are listed, else counted by its parts, but for the LAST window, which
    only those rows have whose window before was not listed. Of totals [4, rows, pieces], the first are the
    survey's, then come the sums above both windows, and those from the lower end of the first one on. Of
    places [rows, pieces, 2], the first is where a piece's masses are in the row's list, then their number.
    """
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row)
    if (temperature <= 0) | (top_p >= 1.0) | (tl.load(top_k_ptr + row) > 0):
        return
    peak = tl.load(peaks_ptr + row)
    if not tl.abs(peak) < float("inf"):
        return
    rows, pieces = tl.num_programs(0), tl.num_programs(1)
    line = lines_ptr + row * (BINS + 4)
    next_line = line + rows * (BINS + 4)
    sums, step = totals_ptr + row * pieces, rows * pieces
    total = sum_of(sums, pieces, PIECES)
    if LAST:
        if tl.load(line + BINS + 2) <= ROOM:
            return
        low, high = tl.load(line + BINS), tl.load(line + BINS + 1)
        above, upto = sum_of(sums + step, pieces, PIECES), sum_of(sums + 3 * step, pieces, PIECES)
        line = next_line
        low, high, held = _narrowed(line, above, upto, low, low, high, top_p.to(tl.float64) * total, BINS)
    else:
        low, base, high = _first_window()
        low, high, held = _narrowed(line, 0.0, total, low, base, high, top_p.to(tl.float64) * total, BINS)
    if number == 0:
        tl.store(line + BINS, low)
        tl.store(line + BINS + 1, high)
        tl.store(line + BINS + 2, held)
    piece, largest = number * PIECE + tl.arange(0, PIECE), largest_ptr + row * groups
    logits, least = logits_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride, tl.load(min_p_ptr + row)
    mass = _masses_from(logits, largest, piece, groups, low, peak, temperature, least, GROUP)
    _add_from(sums + (2 if LAST else 1) * step + number, mass, high)
    if held <= ROOM:
        place = places_ptr + 2 * (row * pieces + number)
        _list_within(listed_ptr + row * ROOM, line + BINS + 3, place, mass, low, high, ROOM)
    elif not LAST:
        _add_from(sums + 3 * step + number, mass, low)
        _count(next_line, mass, low, low, high, BINS)
