"""Latent attention in Triton: one kernel that prepares and caches, and one that attends.

Queries are compared with latents as they lie in the cache, for which their parts without positions have
been multiplied by the matrix that makes keys. A latent is a key and a value at once, and is read once for
both; all heads share it. What `attend_latent` adds up are latents too, which the matrix that makes values
turns into a head's result. `join` of the plain attention adds its splits up.
"""

# Triton hands a NamedTuple to a kernel as it is.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language import constexpr

from worker.kernels.cuda.attention_kernel import (
    add_scores,
    block_of,
    tiles_of,
    token_of_splits,
    visible,
    write,
)
from worker.kernels.cuda.rotary import prepared


class LatentForm(NamedTuple):
    """What a variant is compiled for: the heads of a layer, and the numbers of a cached row."""

    heads: int  # query heads
    group: int  # the heads of a part; the last part may have fewer
    rank: int  # numbers of a latent
    wide: int  # `rank`, filled up to a power of two
    rope: int  # numbers of the rotated key behind it
    rope_wide: int
    page: int  # tokens of a cache block


@triton.jit
def prepare_latent(
    q_ptr, latent_ptr, out_ptr, cache_ptr, slots_ptr, angles_ptr, q_stride, latent_stride, FORM: constexpr,
    NOPE: constexpr, HEADS: constexpr, ROTATED: constexpr,
):  # fmt: skip
    """Rotate the parts of some query heads that have positions; behind all heads, cache the token's row."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    rank: constexpr = FORM.rank
    rope: constexpr = FORM.rope
    dims = tl.arange(0, FORM.rope_wide)[None, :]
    there, head = dims < rope, first + tl.arange(0, HEADS)[:, None]
    if first < FORM.heads:
        known = head < FORM.heads
        x_ptr = q_ptr + token * q_stride + head * (NOPE + rope) + NOPE
        x = prepared(x_ptr, known, None, angles_ptr, token, 0.0, rope, FORM.rope_wide, ROTATED, False)
        at = out_ptr + (token * FORM.heads + head) * rope + dims
        tl.store(at, x.to(out_ptr.dtype.element_ty), mask=known & there)
    else:
        x_ptr = latent_ptr + token * latent_stride
        row = cache_ptr + tl.load(slots_ptr + token) * (rank + rope)
        numbers = tl.arange(0, FORM.wide)
        tl.store(row + numbers, tl.load(x_ptr + numbers, mask=numbers < rank, other=0.0), mask=numbers < rank)
        head -= first  # the rotated key is one head
        x_ptr += rank + head
        key = prepared(x_ptr, head < 1, None, angles_ptr, token, 0.0, rope, FORM.rope_wide, ROTATED, False)
        at = row + rank + head + dims
        tl.store(at, key.to(cache_ptr.dtype.element_ty), mask=(head < 1) & there)


@triton.jit
def _add_tile(
    largest, total, result, q, q_rope, start, high, seen, table, cache_ptr, scale, FORM: constexpr,
    BN: constexpr, MASKED: constexpr,
):  # fmt: skip
    """Add one tile of cached rows to each query's largest score, sum of weights and result."""
    position = start + tl.arange(0, BN)
    held = position < high
    if FORM.page % BN == 0:  # the whole tile lies in one page
        page = tl.load(table + start // FORM.page).to(tl.int64)
        row = page * FORM.page + start % FORM.page + tl.arange(0, BN)
    else:
        page = tl.load(table + position // FORM.page, mask=held, other=0).to(tl.int64)
        row = page * FORM.page + position % FORM.page
    at = cache_ptr + row[:, None] * (FORM.rank + FORM.rope)
    numbers, dims = tl.arange(0, FORM.wide)[None, :], tl.arange(0, FORM.rope_wide)[None, :]
    if MASKED or FORM.rank != FORM.wide:
        latents = tl.load(at + numbers, mask=held[:, None] & (numbers < FORM.rank), other=0.0)
    else:
        latents = tl.load(at + numbers)
    if MASKED or FORM.rope != FORM.rope_wide:
        keys = tl.load(at + FORM.rank + dims, mask=held[:, None] & (dims < FORM.rope), other=0.0)
    else:
        keys = tl.load(at + FORM.rank + dims)
    scores = tl.dot(q_rope, tl.trans(keys), input_precision="ieee")
    scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee") * scale  # in units of log 2
    if MASKED:
        scores = tl.where(visible(seen, seen, position, high, True, -1), scores, float("-inf"))
    return add_scores(largest, total, result, scores, latents)  # pyright: ignore


@triton.jit(do_not_specialize=["table_stride", "splits"])
def attend_latent(
    q_ptr, q_rope_ptr, cache_ptr, out_ptr, partial_ptr, logs_ptr, table_ptr, lens_ptr, starts_ptr, rows_ptr,
    tokens_ptr, scale, table_stride, splits, FORM: constexpr, BM: constexpr, BN: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Compute one block of queries [BM] of one part of the heads, or one split of its cached rows.

    q [T, heads, rank] and q_rope [T, heads, rope] -> [T, heads, rank].
    """
    split = tl.program_id(2)
    row, first, begin, new = block_of(tl.program_id(0), rows_ptr, tokens_ptr, starts_ptr)  # pyright: ignore
    if row < 0:  # a graph is replayed for a smaller step
        return
    length = tl.load(lens_ptr + row)
    before = length - new
    group: constexpr = FORM.group
    wide: constexpr = FORM.wide
    rank: constexpr = FORM.rank
    lane = tl.arange(0, BM)
    token, head = first + lane // group, tl.program_id(1) * group + lane % group
    used = (token < new) & (lane < BM // group * group) & (head < FORM.heads)
    at = (begin + token).to(tl.int64) * FORM.heads + head
    numbers, dims = tl.arange(0, wide)[None, :], tl.arange(0, FORM.rope_wide)[None, :]
    q = tl.load(q_ptr + at[:, None] * rank + numbers, mask=used[:, None] & (numbers < rank), other=0.0)
    q_rope_at = q_rope_ptr + at[:, None] * FORM.rope + dims
    q_rope = tl.load(q_rope_at, mask=used[:, None] & (dims < FORM.rope), other=0.0)
    stop = before + tl.minimum(first + BM // group, new)
    low, plain, high = tiles_of(  # pyright: ignore
        first, stop, before, length, split, splits, BN, SPLIT, True, -1
    )
    table = table_ptr + row.to(tl.int64) * table_stride
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, wide], tl.float32)
    for start in range(low, plain, BN):
        top, total, result = _add_tile(
            top, total, result, q, q_rope, start, high, before + token, table, cache_ptr, scale, FORM, BN,
            False,
        )  # fmt: skip
    for start in range(plain, high, BN):
        top, total, result = _add_tile(
            top, total, result, q, q_rope, start, high, before + token, table, cache_ptr, scale, FORM, BN,
            True,
        )  # fmt: skip
    if low < high or not SPLIT:
        place = token_of_splits(lane, BM, group) * FORM.heads + head if SPLIT else at
        write(
            out_ptr, partial_ptr, logs_ptr, place, used, top, total, result, split, splits, rank, wide,
            SPLIT,
        )  # fmt: skip
