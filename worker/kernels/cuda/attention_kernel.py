"""Attention in Triton: one kernel for prompts, decoding rows and encoders, and one that joins splits.

A program computes a block of queries: as many new tokens of one sequence as fit BM rows, with all query heads
that share a key head side by side. It reads keys in tiles of BN, first those that all its queries see, then
those that need a mask. Where few rows would leave multiprocessors idle, or others would wait for a long one,
the keys of a block are split over several programs, whose results `join` adds up in their order, or, if they
have counters, the last of these programs. Everything is computed in float32 but the products of tiles.
DEPENDENT kernels may begin before the one ahead of them has ended.

What is known when a model is loaded (`Form`) is a constant of a variant. `scale` makes scores of products, as
they are where a cap follows, else in units of log 2; results are multiplied with `value_scale`, which cached
values of 8 bits may have.
"""

# Triton hands a NamedTuple to a kernel as it is.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.cuda.fused.arrivals import is_last

_AT_ONCE: constexpr = constexpr(4)
"""The splits that are joined at a time by the program that ends last."""


class Form(NamedTuple):
    """The constants of a compiled variant: the heads of a layer, and which keys their queries see."""

    heads: int  # key heads
    group: int  # query heads for each of them
    dim: int
    wide: int  # `dim`, filled up to a power of two
    page: int  # tokens of a cache block; 0 for texts without a cache, each token of which sees the whole text
    window: int  # -1 for none
    capped: bool
    reach: int  # the largest distance of a bias by distance; -1 for no bias
    sloping: bool  # whether the scores of a head fall by its slope with each position of distance
    sinks: bool
    causal: bool  # whether a token sees no later ones
    ahead: bool  # whether tokens see as far as a table of last positions says, and not up to themselves
    skipped: int  # positions at the beginning that are seen by nobody else


@triton.jit
def _end_of(last_ptr, begin, last, before, AHEAD: constexpr):
    """The position behind all that the tokens before `last` see, which follow `before` others."""
    if AHEAD:
        return tl.load(last_ptr + begin + last - 1) + 1
    return before + last


@triton.jit
def _keys_of(first, stop, before, length, BN: constexpr, CAUSAL: constexpr, WINDOW: constexpr):
    """The positions [low, high) that tokens see which follow `before + first` others, and see up to `stop`.

    With a window, a token of a prompt sees so many positions, its own included, and one of an encoder so many
    on each side.
    """
    low = 0
    high = length
    if CAUSAL:
        high = tl.minimum(length, stop)
        if WINDOW >= 0:
            low = tl.maximum(0, before + first - WINDOW + 1) // BN * BN
    elif WINDOW >= 0:
        low = tl.maximum(0, first - WINDOW) // BN * BN
        high = tl.minimum(length, stop + WINDOW)
    return low, high


@triton.jit
def tiles_of(
    first, stop, before, length, split, splits, BN: constexpr, SPLIT: constexpr, CAUSAL: constexpr,
    WINDOW: constexpr, SKIPPED: constexpr,
):  # fmt: skip
    """The keys [low, high) of a block or of one split of it; the tiles of [low, plain) need no mask.

    Splits are whole tiles, and the last ones may have none.
    """
    low, high = _keys_of(first, stop, before, length, BN, CAUSAL, WINDOW)  # pyright: ignore
    if SPLIT:
        size = tl.cdiv(tl.cdiv(high - low, BN), splits) * BN
        low += split * size
        high = tl.minimum(high, low + size)
    plain = high
    if CAUSAL:
        plain = tl.minimum(high, before + first + 1)  # the first query sees all of them
    if (WINDOW >= 0) | (SKIPPED > 0):
        plain = low
    return low, low + tl.maximum(plain - low, 0) // BN * BN, high


@triton.jit
def block_of(entry, rows_ptr, tokens_ptr, starts_ptr, SPLIT: constexpr):
    """The row of an entry, -1 for none, the first token of its block, where the row begins, its new tokens.

    Then the number of its split, and how many the block has.
    """
    row, word = tl.load(rows_ptr + entry), tl.load(tokens_ptr + entry)
    begin = tl.load(starts_ptr + tl.maximum(row, 0))
    new = tl.load(starts_ptr + tl.maximum(row, 0) + 1) - begin
    if SPLIT:  # blocks hold whole rows
        return row, word * 0, begin, new, word & 0xFFFF, (word >> 16) + 1
    return row, word, begin, new, word * 0, word * 0 + 1


@triton.jit
def _places(table, start, high, head, stride, FORM: constexpr, BN: constexpr):
    """Where the keys [BN] of a tile begin, counted in numbers."""
    position = start + tl.arange(0, BN)
    if FORM.page == 0:
        return position.to(tl.int64) * stride + head * FORM.dim
    if FORM.page % BN == 0:  # the whole tile lies in one page
        page = tl.load(table + start // FORM.page).to(tl.int64)
        return ((page * FORM.heads + head) * FORM.page + start % FORM.page + tl.arange(0, BN)) * FORM.dim
    page = tl.load(table + position // FORM.page, mask=position < high, other=0).to(tl.int64)
    return ((page * FORM.heads + head) * FORM.page + position % FORM.page) * FORM.dim


@triton.jit
def visible(own, last, position, high, CAUSAL: constexpr, WINDOW: constexpr, SKIPPED: constexpr):
    """The mask [BM, BN] of the keys that each query sees, which stands at `own` and sees up to `last`."""
    mask = (position < high)[None, :]
    if CAUSAL:
        mask = mask & (position[None, :] <= last[:, None])
        if WINDOW >= 0:
            mask = mask & (position[None, :] > own[:, None] - WINDOW)
    elif WINDOW >= 0:
        near = (position[None, :] <= own[:, None] + WINDOW) & (position[None, :] >= own[:, None] - WINDOW)
        mask = mask & near
    if SKIPPED > 0:
        mask = mask & ((position >= SKIPPED)[None, :] | (position[None, :] == own[:, None]))
    return mask


@triton.jit
def add_scores(largest, total, result, scores, values):
    """Add keys by their scores [BM, BN] and their values to largest scores, sums of weights and results."""
    top = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)  # a query may see no key of this tile
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(largest - base)
    result = tl.dot(weights.to(values.dtype), values, result * kept[:, None], input_precision="ieee")
    return top, total * kept + tl.sum(weights, 1), result


@triton.jit
def _add_tile(
    largest, total, result, q, start, high, own, last, head, bias, table, k_ptr, v_ptr, k_stride, v_stride,
    scale, softcap, FORM: constexpr, BN: constexpr, MASKED: constexpr,
):  # fmt: skip
    """Add one tile of keys and values to each query's largest score, sum of weights and result."""
    position = start + tl.arange(0, BN)
    dims = tl.arange(0, FORM.wide)
    keys = k_ptr + _places(table, start, high, head, k_stride, FORM, BN)[None, :] + dims[:, None]
    values = v_ptr + _places(table, start, high, head, v_stride, FORM, BN)[:, None] + dims[None, :]
    if MASKED or FORM.dim != FORM.wide:
        held, there = position < high, dims < FORM.dim
        keys = tl.load(keys, mask=held[None, :] & there[:, None], other=0.0)
        values = tl.load(values, mask=held[:, None] & there[None, :], other=0.0)
    else:
        keys, values = tl.load(keys), tl.load(values)
    keys, values = keys.to(q.dtype), values.to(q.dtype)  # a cache may have 8 bits
    scores = tl.dot(q, keys, input_precision="ieee") * scale  # in units of log 2
    if FORM.capped:  # softcap * tanh(score / softcap)
        turned = tl.exp2(scores * (2.8853900817779268 / softcap))
        scores = softcap * (1.0 - 2.0 / (turned + 1.0)) * 1.4426950408889634
    if FORM.reach >= 0:
        distance = tl.minimum(tl.maximum(position[None, :] - own[:, None], -FORM.reach), FORM.reach)
        scores += tl.load(bias[:, None] + distance + FORM.reach).to(tl.float32) * 1.4426950408889634
    if FORM.sloping:
        distance = (position[None, :] - own[:, None]).to(tl.float32)
        scores += bias[:, None] * distance
    if MASKED:
        mask = visible(own, last, position, high, FORM.causal, FORM.window, FORM.skipped)
        scores = tl.where(mask, scores, float("-inf"))
    return add_scores(largest, total, result, scores, values)  # pyright: ignore


@triton.jit
def _start(sinks_ptr, query_head, used, first_split, BM: constexpr, SINKS: constexpr):
    """The largest score and the sum of weights [BM] before any key: those of sinks, in the first split."""
    if SINKS:
        sink = tl.load(sinks_ptr + query_head, mask=used & first_split, other=float("-inf"))
        top = sink.to(tl.float32) * 1.4426950408889634
        return top, tl.where(top == float("-inf"), 0.0, 1.0)
    return tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)


@triton.jit
def token_of_splits(lane, BM: constexpr, GROUP: constexpr):
    """The place [BM] of each token among those of all entries, which are filled up."""
    return tl.program_id(0).to(tl.int64) * (BM // GROUP) + lane // GROUP


@triton.jit
def write(
    out_ptr, partial_ptr, logs_ptr, place, own, used, top, total, result, splits, DIM: constexpr,
    WIDE: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Write the heads of a block to their places, in heads of the step, or `own` ones of this split."""
    dims = tl.arange(0, WIDE)
    there = used[:, None] & (dims < DIM)[None, :]
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        tl.store(partial_ptr + own[:, None] * DIM + dims[None, :], result, mask=there & (splits > 1))
        log = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(logs_ptr + own, log, mask=used & (splits > 1))
        there = there & (splits == 1)
    at = out_ptr + place[:, None] * DIM + dims[None, :]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["table_stride"])
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, logs_ptr, table_ptr, lens_ptr, starts_ptr, rows_ptr,
    tokens_ptr, table_stride, bias_ptr, sinks_ptr, last_ptr, scale, softcap, value_scale, q_stride, k_stride,
    v_stride, counters_ptr, FORM: constexpr, BM: constexpr, BN: constexpr, SPLIT: constexpr,
    DEPENDENT: constexpr,
):  # fmt: skip
    """Compute one block of queries [BM] of one key head, or one split of its keys."""
    if DEPENDENT:
        gdc_wait()
    entry, head = tl.program_id(0), tl.program_id(1)
    row, first, begin, new, split, splits = block_of(entry, rows_ptr, tokens_ptr, starts_ptr, SPLIT)  # pyright: ignore
    if row < 0:  # a graph is replayed for a smaller step
        return
    length = tl.load(lens_ptr + row) if FORM.page > 0 else new
    before = length - new
    group: constexpr = FORM.group
    wide: constexpr = FORM.wide
    lane, dims = tl.arange(0, BM), tl.arange(0, wide)
    token, query_head = first + lane // group, head * group + lane % group
    used = (token < new) & (lane < BM // group * group)
    at = (begin + token).to(tl.int64)
    q_at = q_ptr + (at * q_stride + query_head * FORM.dim)[:, None] + dims[None, :]
    q = tl.load(q_at, mask=used[:, None] & (dims < FORM.dim)[None, :], other=0.0)
    own = before + token
    last = tl.load(last_ptr + at, mask=used, other=0) if FORM.ahead else own
    stop = _end_of(last_ptr, begin, tl.minimum(first + BM // group, new), before, FORM.ahead)
    low, plain, high = tiles_of(  # pyright: ignore
        first, stop, before, length, split, splits, BN, SPLIT, FORM.causal, FORM.window, FORM.skipped
    )
    k_ptr, v_ptr = k_ptr + begin.to(tl.int64) * k_stride, v_ptr + begin.to(tl.int64) * v_stride  # 0 for pages
    table = table_ptr + row.to(tl.int64) * table_stride
    bias = bias_ptr if FORM.reach < 0 else bias_ptr + tl.where(used, query_head, 0) * (2 * FORM.reach + 1)
    if FORM.sloping:
        bias = tl.load(bias_ptr + query_head, mask=used, other=0.0) * 1.4426950408889634
    top, total = _start(sinks_ptr, query_head, used, split == 0, BM, FORM.sinks)  # pyright: ignore
    result = tl.zeros([BM, wide], tl.float32)
    for start in range(low, plain, BN):
        top, total, result = _add_tile(
            top, total, result, q, start, high, own, last, head, bias, table, k_ptr, v_ptr, k_stride,
            v_stride, scale, softcap, FORM, BN, False,
        )  # fmt: skip
    for start in range(plain, high, BN):
        top, total, result = _add_tile(
            top, total, result, q, start, high, own, last, head, bias, table, k_ptr, v_ptr, k_stride,
            v_stride, scale, softcap, FORM, BN, True,
        )  # fmt: skip
    _write_and_join(
        out_ptr, partial_ptr, logs_ptr, counters_ptr, at, lane, query_head, used, top, total,
        result * value_scale, split, splits, FORM, BM, SPLIT, DEPENDENT,
    )  # fmt: skip


@triton.jit
def _write_and_join(
    out_ptr, partial_ptr, logs_ptr, counters_ptr, at, lane, query_head, used, top, total, result, split,
    splits, FORM: constexpr, BM: constexpr, SPLIT: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    """Write the results of a block or a split; with counters the last program of a block joins its splits."""
    if DEPENDENT:
        gdc_launch_dependents()
    heads: constexpr = FORM.heads * FORM.group
    own, place = token_of_splits(lane, BM, FORM.group) * heads + query_head, at * heads + query_head
    write(
        out_ptr, partial_ptr, logs_ptr, place, own, used, top, total, result, splits, FORM.dim, FORM.wide,
        SPLIT,
    )  # fmt: skip
    if SPLIT and counters_ptr is not None:
        step: constexpr = BM // FORM.group * heads
        counter_ptr = counters_ptr + (tl.program_id(0) - split) * FORM.heads + tl.program_id(1)
        _join_if_last(  # pyright: ignore
            out_ptr, partial_ptr, logs_ptr, counter_ptr, place, own - split * step, step, used, splits,
            FORM.dim, FORM.wide,
        )  # fmt: skip


@triton.jit
def _join_if_last(
    out_ptr, partial_ptr, logs_ptr, counter_ptr, place, own, step, used, splits, DIM: constexpr,
    WIDE: constexpr,
):  # fmt: skip
    """Join the splits of a block, if there are several and this program is the last of them."""
    if splits > 1:
        last = is_last(counter_ptr, splits)
        if last:
            _join_block(out_ptr, partial_ptr, logs_ptr, place, own, step, used, splits, DIM, WIDE)  # pyright: ignore


@triton.jit
def _join_block(
    out_ptr, partial_ptr, logs_ptr, place, own, step, used, splits, DIM: constexpr, WIDE: constexpr
):  # fmt: skip
    """Join the splits of a block's heads [BM]: the first are at `own`, each other `step` further."""
    dims = tl.arange(0, WIDE)
    there = used[:, None] & (dims < DIM)[None, :]
    top, total = tl.full(own.shape, float("-inf"), tl.float32), tl.zeros(own.shape, tl.float32)
    result = tl.zeros([own.shape[0], WIDE], tl.float32)
    for start in range(0, splits, _AT_ONCE):
        for number in tl.static_range(_AT_ONCE):  # so that no load waits for another one
            known, at = used & (start + number < splits), own + (start + number) * step
            log = tl.load(logs_ptr + at, mask=known, other=float("-inf"), cache_modifier=".cg")
            part = partial_ptr + at[:, None] * DIM + dims[None, :]
            part = tl.load(part, mask=known[:, None] & there, other=0.0, cache_modifier=".cg")
            largest = tl.maximum(top, log)
            base = tl.where(largest == float("-inf"), 0.0, largest)
            weight, kept = tl.exp2(log - base), tl.exp2(top - base)
            top, total = largest, total * kept + weight
            result = result * kept[:, None] + part * weight[:, None]
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    at = out_ptr + place[:, None] * DIM + dims[None, :]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def join(
    partial_ptr, logs_ptr, out_ptr, starts_ptr, rows_ptr, tokens_ptr, HEADS: constexpr, DIM: constexpr,
    WIDE: constexpr, TOKENS: constexpr, MOST: constexpr,
):  # fmt: skip
    """Join the splits of one query head of HEADS of a block of up to TOKENS tokens, MOST at a time.

    The program of a block's first split does so.
    """
    entry, head = tl.program_id(0), tl.program_id(1)
    row, _, begin, new, split, splits = block_of(entry, rows_ptr, tokens_ptr, starts_ptr, True)  # pyright: ignore
    if (row < 0) | (split > 0) | (splits == 1):
        return
    dims = tl.arange(0, WIDE)
    for token in range(new):
        largest, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        result = tl.zeros([WIDE], tl.float32)
        for start in range(0, splits, MOST):
            number = start + tl.arange(0, MOST)
            place = ((entry + number).to(tl.int64) * TOKENS + token) * HEADS + head
            logs = tl.load(logs_ptr + place, mask=number < splits, other=float("-inf"))
            top = tl.maximum(largest, tl.max(logs, 0))  # the first split has keys
            weights, kept = tl.exp2(logs - top), tl.exp2(largest - top)
            there = (logs > float("-inf"))[:, None] & (dims < DIM)[None, :]
            parts = tl.load(partial_ptr + place[:, None] * DIM + dims[None, :], mask=there, other=0.0)
            result = result * kept + tl.sum(parts * weights[:, None], 0)
            largest, total = top, total * kept + tl.sum(weights, 0)
        at = out_ptr + ((begin + token).to(tl.int64) * HEADS + head) * DIM + dims
        tl.store(at, (result / total).to(out_ptr.dtype.element_ty), mask=dims < DIM)
