"""Kernels for mixtures of experts: pairs are sorted by expert, multiplied, and added up for each token.

A pair is a token with one of its experts.
"""

# Triton hands a NamedTuple to a kernel as it is.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from worker.kernels.cuda.linear import applied, let_through
from worker.kernels.cuda.products.quantized_kernel import add_tile


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
def multiply_pairs(
    x_ptr, parts, bias_ptr, out_ptr, pairs_ptr, experts_ptr, x_stride, out_width, begin, outputs, inputs,
    width, expert_bytes, FORM: constexpr, CHOSEN: constexpr, EXPERTS: constexpr, FUNCTION: constexpr,
    GATED: constexpr, BN: constexpr, BM: constexpr,
):  # fmt: skip
    """Multiply BM pairs of one expert, which `experts` names, by BN rows of its matrix, from `begin` on.

    Each pair, -1 for none, reads the row of its token, of whose CHOSEN pairs it is one; or with CHOSEN 1 its
    own. Without `pairs` a block is one pair. The parts of an expert's matrix lie `expert_bytes` behind those
    of the expert before. GATED: the first half of a matrix makes gates, the second what they let through, and
    a program takes as many rows of each.
    """
    block = tl.program_id(1)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if (expert < 0) | (expert >= EXPERTS):
        return
    lane = tl.arange(0, BM)
    if pairs_ptr is None:
        pair, held = (lane + block).to(tl.int64), lane < 1
    else:
        pair = tl.load(pairs_ptr + block * BM + lane).to(tl.int64)
        held = pair >= 0
    row = tl.where(held, pair, 0) // CHOSEN
    made: constexpr = BN // 2 if GATED else BN
    number, column = tl.arange(0, BN), tl.program_id(0) * made + tl.arange(0, made)
    n = begin + tl.program_id(0) * made + number % made + tl.where(number < made, 0, outputs // 2)
    there = tl.program_id(0) * made + number % made < out_width
    skipped = expert * expert_bytes
    size: constexpr = parts.codes.dtype.element_ty.primitive_bitwidth // 8
    matrix = parts.codes + skipped // size + n.to(tl.int64)[:, None] * width
    total = tl.zeros([BN, BM], tl.float32)
    for tile in range(tl.cdiv(inputs, FORM.tile)):
        total = add_tile(
            total, matrix, n, there, tile * FORM.tile, x_ptr, row, held, inputs, x_stride, parts, skipped,
            outputs, FORM,
        )  # fmt: skip
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * outputs + n, mask=there, other=0.0)
        total += bias.to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, made, BM]), (1, 2, 0)))
        out = let_through(gate, up, FUNCTION)
    else:
        out = applied(total, FUNCTION)
    at = out_ptr + pair[None, :] * out_width + column[:, None]
    mask = (column < out_width)[:, None] & held[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_pairs(
    results_ptr, ids_ptr, weights_ptr, out_ptr, width, out_stride, CHOSEN: constexpr, EXPERTS: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Add the results of a token's experts by weight, in the order of the experts, for a piece of its row."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):  # so that loads of all are on their way at once
        pair = token * CHOSEN + choice
        expert = tl.load(ids_ptr + pair)
        there = (at < width) & (expert >= 0) & (expert < EXPERTS)
        result = tl.load(results_ptr + pair * width + at, mask=there, other=0.0).to(tl.float32)
        total += result * tl.load(weights_ptr + pair)
    tl.store(out_ptr + token * out_stride + at, total.to(out_ptr.dtype.element_ty), mask=at < width)
