"""Pairs of a token and one of its experts in Triton: sorted for products, and their results added up.

Shapes depend on the number of tokens alone, never on what they chose: so no result is waited for, and a graph
can be replayed for any choice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def _chosen(ids_ptr, at, count, EXPERTS: constexpr):
    """The experts of pairs; EXPERTS for those beyond the last pair, and for experts of other ranks."""
    ids = tl.load(ids_ptr + at, mask=at < count, other=EXPERTS)
    return tl.where((ids < 0) | (ids > EXPERTS), EXPERTS, ids)


@triton.jit(do_not_specialize=["count", "blocks"])
def sort_pairs(
    ids_ptr, pairs_ptr, experts_ptr, count, blocks, EXPERTS: constexpr, BINS: constexpr, BM: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Write the pairs of one expert, in their order, into blocks of BM behind those of the experts before.

    The last block is filled up with -1. `experts` says whose each of the `blocks` is: -1 for those left over.
    """
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, count, BLOCK):
        counts += tl.histogram(_chosen(ids_ptr, start + tl.arange(0, BLOCK), count, EXPERTS), BINS)
    needed = tl.where(bins < EXPERTS, (counts + BM - 1) // BM, 0)
    first = tl.sum(tl.where(bins < mine, needed, 0), 0)
    own = tl.sum(tl.where(bins == mine, needed, 0), 0)
    done = 0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_mine = (_chosen(ids_ptr, at, count, EXPERTS) == mine).to(tl.int32)
        place = first * BM + done + tl.cumsum(is_mine, 0) - 1
        tl.store(pairs_ptr + place, at, mask=is_mine > 0)
        done += tl.sum(is_mine, 0)
    left = done + tl.arange(0, BM)
    tl.store(pairs_ptr + first * BM + left, tl.full([BM], -1, tl.int32), mask=left < own * BM)
    for start in range(0, own, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tl.store(experts_ptr + first + block, tl.zeros([BLOCK], tl.int32) + mine, mask=block < own)
    if mine == EXPERTS - 1:
        for start in range(first + own, blocks, BLOCK):
            block = start + tl.arange(0, BLOCK)
            tl.store(experts_ptr + block, tl.full([BLOCK], -1, tl.int32), mask=block < blocks)


@triton.jit
def add_pairs(
    results_ptr, ids_ptr, weights_ptr, out_ptr, width, CHOSEN: constexpr, EXPERTS: constexpr, BLOCK: constexpr
):
    """Add the results of a token's experts by weight, in the order of the experts, for a piece of its row."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOSEN):
        pair = token * CHOSEN + choice
        expert = tl.load(ids_ptr + pair)
        there = (at < width) & (expert >= 0) & (expert < EXPERTS)
        result = tl.load(results_ptr + pair * width + at, mask=there, other=0.0).to(tl.float32)
        total += result * tl.load(weights_ptr + pair)
    tl.store(out_ptr + token * width + at, total.to(out_ptr.dtype.element_ty), mask=at < width)
