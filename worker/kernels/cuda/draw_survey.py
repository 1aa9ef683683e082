"""What all multiprocessors find out about a row before its token is drawn, by Triton.

`survey_groups` reads all masses once. For a row with a top_p and no top_k, `narrow` then says between which
two numbers the floor lies, which are the closer the more masses lie there: a program counts the masses of its
piece in BINS parts of the window before, so how much mass lies above each part is known within the width of
a part. Twice that leaves about one mass in a hundred, which are written down for the search. Whatever lies
above the window is added up, not counted, so nothing of the floor depends on how it was found.

A window is two numbers of 31 bits, those of a float32 that is in it and of one above it: positive floats are
ordered as their bits.
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
    """The window of the survey, from 2**-32 to 1: its 64 parts are halves of octaves."""
    return tl.full([], 0x2F800001, tl.int32), tl.full([], 0x3F800001, tl.int32)


@triton.jit
def _part_shift(low, high, BINS: constexpr):
    """The bits of the numbers within a part, so that a window has no more than BINS parts."""
    return tl.sum(((high - low - 1) >> tl.arange(0, 32) >= BINS).to(tl.int32), 0)


@triton.jit
def _count(counts, mass, low, high, BINS: constexpr):
    """Write how many masses [N, GROUP] lie in each part [BINS] of a window."""
    mass = tl.reshape(mass, [mass.shape[0] * mass.shape[1]], can_reorder=True)
    bits = mass.to(tl.int32, bitcast=True)
    within = (bits >= low) & (bits < high)
    part = tl.where(within, bits - low, 0) >> _part_shift(low, high, BINS)
    tl.store(counts + tl.arange(0, BINS), tl.histogram(part, BINS, mask=within))


@triton.jit
def _narrowed(counts_ptr, above, low, high, bottom, goal, pieces, PIECES: constexpr, BINS: constexpr):
    """The window within another whose parts have such counts [pieces, BINS]. `above`: the sum over it.

    `bottom` is the lower end if no part has the goal above it for certain.
    """
    piece, part = tl.arange(0, PIECES)[:, None], tl.arange(0, BINS)
    counts = tl.load(counts_ptr + piece * BINS + part[None, :], mask=piece < pieces, other=0)
    counts = tl.sum(counts, 0).to(tl.float64)
    shift = _part_shift(low, high, BINS)
    edge = low + (part << shift)
    least = counts * edge.to(tl.float32, bitcast=True).to(tl.float64)
    most = counts * (low + ((part + 1) << shift)).to(tl.float32, bitcast=True).to(tl.float64)
    enough = tl.sum((above + tl.cumsum(least, 0, reverse=True) >= goal).to(tl.int32), 0)
    perhaps = tl.sum((above + tl.cumsum(most, 0, reverse=True) >= goal).to(tl.int32), 0)
    return tl.where(enough > 0, low + ((enough - 1) << shift), bottom), low + (perhaps << shift)


@triton.jit
def sum_of(pieces_ptr, pieces, PIECES: constexpr):
    """The sum of what the pieces of a row have."""
    piece = tl.arange(0, PIECES)
    return tl.sum(tl.load(pieces_ptr + piece, mask=piece < pieces, other=0.0), 0)


@triton.jit(do_not_specialize=["groups"])
def survey_groups(
    logits_ptr, best_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr,
    largest_ptr, sums_ptr, totals_ptr, counts_ptr, stride, groups, PIECE: constexpr, BINS: constexpr,
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
        low, high = _first_window()
        _count(counts_ptr + place * BINS, mass, low, high, BINS)


@triton.jit(do_not_specialize=["groups"])
def narrow(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, largest_ptr,
    totals_ptr, counts_ptr, window_ptr, above_ptr, next_counts_ptr, next_window_ptr, next_above_ptr,
    listed_ptr, held_ptr, stride, groups, LAST: constexpr, SLOTS: constexpr, PIECES: constexpr,
    PIECE: constexpr, BINS: constexpr, GROUP: constexpr,
):  # fmt: skip
    """Write a narrower window for the floor of a row's top_p, and of a piece what lies above and within it.

    Within it masses are counted by its parts, or, if it is the LAST window, listed: the first SLOTS of them.
    The window before is the survey's, if it is not the last.
    """
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row)
    if (temperature <= 0) | (top_p >= 1.0) | (tl.load(top_k_ptr + row) > 0):
        return
    peak = tl.load(peaks_ptr + row)
    if not tl.abs(peak) < float("inf"):
        return
    pieces = tl.num_programs(1)
    place = row * pieces + number
    counts = counts_ptr + row * pieces * BINS
    goal = top_p.to(tl.float64) * sum_of(totals_ptr + row * pieces, pieces, PIECES)
    if LAST:
        low, high = tl.load(window_ptr + 2 * row), tl.load(window_ptr + 2 * row + 1)
        above = sum_of(above_ptr + row * pieces, pieces, PIECES)
        low, high = _narrowed(counts, above, low, high, low, goal, pieces, PIECES, BINS)
    else:
        low, high = _first_window()
        low, high = _narrowed(counts, 0.0, low, high, 1, goal, pieces, PIECES, BINS)
    if number == 0:
        tl.store(next_window_ptr + 2 * row, low)
        tl.store(next_window_ptr + 2 * row + 1, high)
    piece = number * PIECE + tl.arange(0, PIECE)
    there = piece < groups
    most = tl.load(largest_ptr + row * groups + piece, mask=there, other=0.0)
    there = there & (most.to(tl.int32, bitcast=True) >= low)
    logits = logits_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride
    mass = masses_of(logits, piece, there, peak, temperature, GROUP)
    mass = tl.where(mass >= tl.load(min_p_ptr + row), mass, 0.0)
    over = tl.where(mass.to(tl.int32, bitcast=True) >= high, mass, 0.0)
    tl.store(next_above_ptr + place, tl.sum(tl.sum(over, 1).to(tl.float64), 0))
    if LAST:
        mass = tl.reshape(mass, [PIECE * GROUP], can_reorder=True)
        bits = mass.to(tl.int32, bitcast=True)
        within = ((bits >= low) & (bits < high)).to(tl.int32)
        slot = tl.cumsum(within, 0) - 1
        tl.store(listed_ptr + place * SLOTS + slot, mass, mask=(within > 0) & (slot < SLOTS))
        tl.store(held_ptr + place, tl.sum(within, 0))
    else:
        _count(next_counts_ptr + place * BINS, mass, low, high, BINS)
