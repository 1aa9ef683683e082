"""Latent attention in Triton: one kernel that prepares and caches, and two that attend.

Queries are compared with latents as they lie in the cache, for which their parts without positions have
been multiplied by the matrix that makes keys. A latent is a key and a value at once, and is read once for
both; all heads share it. What `attend_latent` adds up are latents too, which the matrix that makes values
turns into a head's result. `join` of the plain attention adds its splits up. For long prompts `attend_made`
reads keys and values which have been made of each head.

Constants of a variant: HEADS query heads in parts of GROUP, the last of which may have fewer; RANK numbers
of a latent and ROPE of a key behind it, filled up to WIDE and ROPE_WIDE, powers of two; PAGE tokens of a
cache block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from worker.kernels.cuda.attention_kernel import add_scores, tiles_of, token_of_splits, visible, write
from worker.kernels.cuda.rotary import prepared


@triton.jit
def prepare_latent(
    q_ptr, latent_ptr, out_ptr, cache_ptr, slots_ptr, angles_ptr, q_stride, latent_stride, HEADS: constexpr,
    NOPE: constexpr, ROPE: constexpr, ROPE_WIDE: constexpr, RANK: constexpr, WIDE: constexpr,
    ROTATED: constexpr,
):  # fmt: skip
    """Rotate the part of one query head that has positions; behind all heads, cache the token's row."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, ROPE_WIDE)
    there = dims < ROPE
    if head < HEADS:
        x_ptr = q_ptr + token * q_stride + head * (NOPE + ROPE) + NOPE
        x = prepared(x_ptr, None, angles_ptr, token, 0.0, ROPE, ROPE_WIDE, ROTATED, False)
        at = out_ptr + (token * HEADS + head) * ROPE + dims
        tl.store(at, x.to(out_ptr.dtype.element_ty), mask=there)
    else:
        x_ptr = latent_ptr + token * latent_stride
        row = cache_ptr + tl.load(slots_ptr + token) * (RANK + ROPE)
        numbers = tl.arange(0, WIDE)
        tl.store(row + numbers, tl.load(x_ptr + numbers, mask=numbers < RANK, other=0.0), mask=numbers < RANK)
        key = prepared(x_ptr + RANK, None, angles_ptr, token, 0.0, ROPE, ROPE_WIDE, ROTATED, False)
        tl.store(row + RANK + dims, key.to(cache_ptr.dtype.element_ty), mask=there)


@triton.jit
def _add_tile(
    largest, total, result, q, q_rope, start, high, seen, table, cache_ptr, scale, RANK: constexpr,
    WIDE: constexpr, ROPE: constexpr, ROPE_WIDE: constexpr, PAGE: constexpr, BN: constexpr, MASKED: constexpr,
):  # fmt: skip
    """Add one tile of cached rows to each query's largest score, sum of weights and result."""
    position = start + tl.arange(0, BN)
    held = position < high
    if PAGE % BN == 0:  # the whole tile lies in one page
        page = tl.load(table + start // PAGE).to(tl.int64)
        row = page * PAGE + start % PAGE + tl.arange(0, BN)
    else:
        page = tl.load(table + position // PAGE, mask=held, other=0).to(tl.int64)
        row = page * PAGE + position % PAGE
    at = cache_ptr + row[:, None] * (RANK + ROPE)
    numbers, dims = tl.arange(0, WIDE)[None, :], tl.arange(0, ROPE_WIDE)[None, :]
    if MASKED or RANK != WIDE:
        latents = tl.load(at + numbers, mask=held[:, None] & (numbers < RANK), other=0.0)
    else:
        latents = tl.load(at + numbers)
    if MASKED or ROPE != ROPE_WIDE:
        keys = tl.load(at + RANK + dims, mask=held[:, None] & (dims < ROPE), other=0.0)
    else:
        keys = tl.load(at + RANK + dims)
    scores = tl.dot(q_rope, tl.trans(keys), input_precision="ieee")
    scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee") * scale  # in units of log 2
    if MASKED:
        scores = tl.where(visible(seen, position, high, True, -1), scores, float("-inf"))
    return add_scores(largest, total, result, scores, latents)  # pyright: ignore


@triton.jit(do_not_specialize=["table_stride", "splits"])
def attend_latent(
    q_ptr, q_rope_ptr, cache_ptr, out_ptr, partial_ptr, logs_ptr, table_ptr, lens_ptr, starts_ptr, rows_ptr,
    tokens_ptr, scale, table_stride, splits, HEADS: constexpr, GROUP: constexpr, RANK: constexpr,
    WIDE: constexpr, ROPE: constexpr, ROPE_WIDE: constexpr, PAGE: constexpr, BM: constexpr, BN: constexpr,
    SPLIT: constexpr,
):  # fmt: skip
    """Compute one block of queries [BM] of one part of the heads, or one split of its cached rows.

    q [T, HEADS, RANK] and q_rope [T, HEADS, ROPE] -> [T, HEADS, RANK]. `rows` and `tokens`: a block's row of
    the step, -1 for none, and the first of its tokens.
    """
    split = tl.program_id(2)
    row = tl.load(rows_ptr + tl.program_id(0))
    if row < 0:  # a graph is replayed for a smaller step
        return
    first = tl.load(tokens_ptr + tl.program_id(0))
    begin = tl.load(starts_ptr + row)
    new = tl.load(starts_ptr + row + 1) - begin
    length = tl.load(lens_ptr + row)
    before = length - new
    lane = tl.arange(0, BM)
    token, head = first + lane // GROUP, tl.program_id(1) * GROUP + lane % GROUP
    used = (token < new) & (lane < BM // GROUP * GROUP) & (head < HEADS)
    at = (begin + token).to(tl.int64) * HEADS + head
    numbers, dims = tl.arange(0, WIDE)[None, :], tl.arange(0, ROPE_WIDE)[None, :]
    q = tl.load(q_ptr + at[:, None] * RANK + numbers, mask=used[:, None] & (numbers < RANK), other=0.0)
    q_rope = tl.load(q_rope_ptr + at[:, None] * ROPE + dims, mask=used[:, None] & (dims < ROPE), other=0.0)
    low, plain, high = tiles_of(  # pyright: ignore
        first, new, before, length, split, splits, BM // GROUP, BN, SPLIT, True, -1
    )
    table = table_ptr + row.to(tl.int64) * table_stride
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, WIDE], tl.float32)
    for start in range(low, plain, BN):
        top, total, result = _add_tile(
            top, total, result, q, q_rope, start, high, before + token, table, cache_ptr, scale, RANK, WIDE,
            ROPE, ROPE_WIDE, PAGE, BN, False,
        )  # fmt: skip
    for start in range(plain, high, BN):
        top, total, result = _add_tile(
            top, total, result, q, q_rope, start, high, before + token, table, cache_ptr, scale, RANK, WIDE,
            ROPE, ROPE_WIDE, PAGE, BN, True,
        )  # fmt: skip
    if low < high or not SPLIT:
        place = token_of_splits(lane, BM, GROUP) * HEADS + head if SPLIT else at
        write(
            out_ptr, partial_ptr, logs_ptr, place, used, top, total, result, split, splits, RANK, WIDE, SPLIT
        )


@triton.jit
def _add_made_tile(
    largest, total, result, q, q_rope, start, high, seen, made_ptr, held_ptr, scale, EACH: constexpr,
    NOPE: constexpr, NOPE_WIDE: constexpr, ROPE: constexpr, ROPE_WIDE: constexpr, VALUE: constexpr,
    VALUE_WIDE: constexpr, ROW: constexpr, BN: constexpr, MASKED: constexpr,
):  # fmt: skip
    """Add one tile of a head's keys and values, EACH numbers after those of the token before."""
    position = start + tl.arange(0, BN)
    plain, dims, values = tl.arange(0, NOPE_WIDE), tl.arange(0, ROPE_WIDE), tl.arange(0, VALUE_WIDE)
    made = made_ptr + position.to(tl.int64) * EACH
    rotated = held_ptr + position.to(tl.int64) * ROW
    held = position < high
    if MASKED or NOPE != NOPE_WIDE:
        there = held[None, :] & (plain < NOPE)[:, None]
        keys = tl.load(made[None, :] + plain[:, None], mask=there, other=0.0)
    else:
        keys = tl.load(made[None, :] + plain[:, None])
    if MASKED or ROPE != ROPE_WIDE:
        there = held[None, :] & (dims < ROPE)[:, None]
        shared = tl.load(rotated[None, :] + dims[:, None], mask=there, other=0.0)
    else:
        shared = tl.load(rotated[None, :] + dims[:, None])
    if MASKED or VALUE != VALUE_WIDE:
        there = held[:, None] & (values < VALUE)[None, :]
        read = tl.load(made[:, None] + NOPE + values[None, :], mask=there, other=0.0)
    else:
        read = tl.load(made[:, None] + NOPE + values[None, :])
    scores = tl.dot(q_rope, shared, input_precision="ieee")
    scores = tl.dot(q, keys, scores, input_precision="ieee") * scale  # in units of log 2
    if MASKED:
        scores = tl.where(visible(seen, position, high, True, -1), scores, float("-inf"))
    return add_scores(largest, total, result, scores, read)  # pyright: ignore


@triton.jit
def attend_made(
    q_ptr, q_rope_ptr, made_ptr, held_ptr, out_ptr, lens_ptr, starts_ptr, rows_ptr, tokens_ptr, scale,
    q_stride, HEADS: constexpr, NOPE: constexpr, NOPE_WIDE: constexpr, ROPE: constexpr,
    ROPE_WIDE: constexpr, VALUE: constexpr, VALUE_WIDE: constexpr, RANK: constexpr, BM: constexpr,
    BN: constexpr,
):  # fmt: skip
    """Compute one block of queries [BM] of one head of the row whose keys and values are made.

    q [T, HEADS, NOPE + ROPE], of which the parts with positions are rotated in q_rope; made [K, HEADS, NOPE +
    VALUE] and held [K, RANK + ROPE] for the row's K tokens -> [T, HEADS, VALUE].
    """
    head, row = tl.program_id(1), tl.load(rows_ptr + tl.program_id(0))
    first = tl.load(tokens_ptr + tl.program_id(0))
    begin = tl.load(starts_ptr + row)
    new = tl.load(starts_ptr + row + 1) - begin
    length = tl.load(lens_ptr + row)
    before = length - new
    token = first + tl.arange(0, BM)
    used = token < new
    at = (begin + token).to(tl.int64)
    plain, dims = tl.arange(0, NOPE_WIDE)[None, :], tl.arange(0, ROPE_WIDE)[None, :]
    q_at = q_ptr + (at * q_stride + head * (NOPE + ROPE))[:, None] + plain
    q = tl.load(q_at, mask=used[:, None] & (plain < NOPE), other=0.0)
    rope_at = q_rope_ptr + ((at * HEADS + head) * ROPE)[:, None] + dims
    q_rope = tl.load(rope_at, mask=used[:, None] & (dims < ROPE), other=0.0)
    low, plain_end, high = tiles_of(first, new, before, length, 0, 1, BM, BN, False, True, -1)  # pyright: ignore
    made_ptr, held_ptr = made_ptr + head * (NOPE + VALUE), held_ptr + RANK
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, VALUE_WIDE], tl.float32)
    for start in range(low, plain_end, BN):
        top, total, result = _add_made_tile(
            top, total, result, q, q_rope, start, high, before + token, made_ptr, held_ptr, scale,
            HEADS * (NOPE + VALUE), NOPE, NOPE_WIDE, ROPE, ROPE_WIDE, VALUE, VALUE_WIDE, RANK + ROPE, BN,
            False,
        )  # fmt: skip
    for start in range(plain_end, high, BN):
        top, total, result = _add_made_tile(
            top, total, result, q, q_rope, start, high, before + token, made_ptr, held_ptr, scale,
            HEADS * (NOPE + VALUE), NOPE, NOPE_WIDE, ROPE, ROPE_WIDE, VALUE, VALUE_WIDE, RANK + ROPE, BN,
            True,
        )  # fmt: skip
    write(out_ptr, None, None, at * HEADS + head, used, top, total, result, 0, 1, VALUE, VALUE_WIDE, False)
