"""Latent attention by Triton: the operation `latent_attention`, as products with latents themselves.

Queries are compared with latents as they lie in the cache, for which cuBLAS multiplies their parts without
positions by the matrix that makes keys. A latent is a key and a value at once, and is read once for both; all
heads share it. What `attend_latent` adds up are latents too, which cuBLAS multiplies by the matrix that makes
values; `join` of the plain attention adds its splits up. Nothing is made for each cached token.

Prompts that begin in a step have keys and values made for their tokens instead, each head its own: that takes
3.4 times fewer products of scores and sums with the widths of DeepSeek. The reference computes what the
kernels cannot: latents of more than 512 numbers, and tensors that lie otherwise in memory.
"""

# Triton hands a NamedTuple to a kernel as it is.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.context import ForwardContext
from models.layers.attention import CachedAttention
from models.layers.latent_attention import LatentAttention
from models.ops import latent_ops
from worker.kernels.cuda.attention import DTYPES, LOG2E, attend_blocks
from worker.kernels.cuda.attention_kernel import add_scores, block_of, tiles_of, visible, write
from worker.kernels.cuda.attention_plan import Heads, Kind, Launch, empty_results, launches_of
from worker.kernels.cuda.capabilities import Card, latent_heads
from worker.kernels.cuda.launch import launch, padded, power_of_2
from worker.kernels.cuda.rotary import heads_at_once, prepared

_MOST_RANK, _MOST_ROPE = 512, 128
"""The widest latent and the widest rotated key."""


class LatentForm(NamedTuple):
    """The constants of a compiled variant: the heads of a layer, and the numbers of a cached row."""

    heads: int  # query heads
    group: int  # the heads of a part, a power of two; the last part may have fewer
    keys: int  # numbers of a key without positions, which is a latent or has been made
    keys_wide: int  # `keys`, filled up to a power of two
    values: int  # numbers of a value; a latent is both
    values_wide: int
    rope: int  # numbers of the rotated key behind a latent
    rope_wide: int
    page: int  # tokens of a cache block; 0 for keys and values that were made for the tokens of a step
    skipped: int  # positions at the beginning that are seen by nobody else


@triton.jit
def prepare_latent(
    q_ptr, latent_ptr, out_ptr, cache_ptr, slots_ptr, angles_ptr, q_stride, latent_stride, FORM: constexpr,
    NOPE: constexpr, HEADS: constexpr, ROTATED: constexpr,
):  # fmt: skip
    """Rotate the parts of some query heads that have positions; behind all heads, cache the token's row.

    out [T, heads + 1, rope] gets the token's rotated key behind its queries.
    """
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    rank: constexpr = FORM.keys
    rope: constexpr = FORM.rope
    out_ptr += token * (FORM.heads + 1) * rope
    dims = tl.arange(0, FORM.rope_wide)[None, :]
    there, head = dims < rope, first + tl.arange(0, HEADS)[:, None]
    if first < FORM.heads:
        known = head < FORM.heads
        x_ptr = q_ptr + token * q_stride + head * (NOPE + rope) + NOPE
        x = prepared(x_ptr, known, None, angles_ptr, token, 0.0, rope, FORM.rope_wide, ROTATED, False)
        tl.store(out_ptr + head * rope + dims, x.to(out_ptr.dtype.element_ty), mask=known & there)
    else:
        x_ptr = latent_ptr + token * latent_stride
        row = cache_ptr + tl.load(slots_ptr + token) * (rank + rope)
        numbers = tl.arange(0, FORM.keys_wide)
        tl.store(row + numbers, tl.load(x_ptr + numbers, mask=numbers < rank, other=0.0), mask=numbers < rank)
        head -= first  # the rotated key is one head
        x_ptr += rank + head
        key = prepared(x_ptr, head < 1, None, angles_ptr, token, 0.0, rope, FORM.rope_wide, ROTATED, False)
        key = key.to(cache_ptr.dtype.element_ty)
        tl.store(row + rank + head + dims, key, mask=(head < 1) & there)
        tl.store(out_ptr + FORM.heads * rope + head + dims, key, mask=(head < 1) & there)


@triton.jit
def _rows_of(at, held, SIZE: constexpr, WIDE: constexpr, MASKED: constexpr):
    """Rows [BN, WIDE] of SIZE numbers that begin at `at` [BN, 1]; those that are not `held` [BN, 1] are 0."""
    numbers = tl.arange(0, WIDE)[None, :]
    if MASKED or SIZE != WIDE:
        return tl.load(at + numbers, mask=held & (numbers < SIZE), other=0.0)
    return tl.load(at + numbers)


@triton.jit
def _queries_of(q_ptr, rope_ptr, begin, token, head, used, q_stride, FORM: constexpr):
    """The queries [BM] of some tokens behind `begin` and heads of a part, and their rotated parts.

    Places within a block are small numbers, whose registers are free again.
    """
    each: constexpr = FORM.keys + (FORM.rope if FORM.page == 0 else 0)  # the numbers of a query
    first = tl.program_id(1) * FORM.group
    q_ptr += begin * q_stride + first * each
    q_ptr += (token * q_stride + head * each)[:, None]
    rope_ptr += (begin * (FORM.heads + 1) + first) * FORM.rope
    rope_ptr += (token * (FORM.heads + 1) + head)[:, None] * FORM.rope
    q = _rows_of(q_ptr, used, FORM.keys, FORM.keys_wide, True)
    return q, _rows_of(rope_ptr, used, FORM.rope, FORM.rope_wide, True)


@triton.jit
def _add_tile(
    largest, total, result, q, q_rope, start, high, seen, table, keys_ptr, rope_ptr, scale, FORM: constexpr,
    BN: constexpr, MASKED: constexpr,
):  # fmt: skip
    """Add one tile of keys and values to each query's largest score, sum of weights and result.

    `keys_ptr` is the cache, or where the keys of the sequence begin that were made for this head; `rope_ptr`
    is where its rotated keys begin then.
    """
    position = start + tl.arange(0, BN)
    held = position < high
    if FORM.page == 0:
        at = keys_ptr + position.to(tl.int64)[:, None] * (FORM.heads * (FORM.keys + FORM.values))
        rope_at = rope_ptr + position.to(tl.int64)[:, None] * ((FORM.heads + 1) * FORM.rope)
    else:
        if FORM.page % BN == 0:  # the whole tile lies in one page
            page = tl.load(table + start // FORM.page).to(tl.int64)
            row = page * FORM.page + start % FORM.page + tl.arange(0, BN)
        else:
            page = tl.load(table + position // FORM.page, mask=held, other=0).to(tl.int64)
            row = page * FORM.page + position % FORM.page
        at = keys_ptr + row[:, None] * (FORM.keys + FORM.rope)
        rope_at = at + FORM.keys
    keys = _rows_of(at, held[:, None], FORM.keys, FORM.keys_wide, MASKED)
    rotated = _rows_of(rope_at, held[:, None], FORM.rope, FORM.rope_wide, MASKED)
    values = keys
    if FORM.page == 0:
        values = _rows_of(at + FORM.keys, held[:, None], FORM.values, FORM.values_wide, MASKED)
    scores = tl.dot(q_rope, tl.trans(rotated), input_precision="ieee")
    scores = tl.dot(q, tl.trans(keys), scores, input_precision="ieee") * scale  # in units of log 2
    if MASKED:
        scores = tl.where(visible(seen, seen, position, high, True, -1, FORM.skipped), scores, float("-inf"))
    return add_scores(largest, total, result, scores, values)  # pyright: ignore


@triton.jit(do_not_specialize=["table_stride"])
def attend_latent(
    q_ptr, rope_ptr, keys_ptr, out_ptr, partial_ptr, logs_ptr, table_ptr, lens_ptr, starts_ptr, rows_ptr,
    tokens_ptr, table_stride, scale, q_stride, FORM: constexpr, BM: constexpr, BN: constexpr,
    SPLIT: constexpr,
):  # fmt: skip
    """Compute one block of queries [BM] of one part of the heads, or one split of its cached rows.

    q_rope [T, heads + 1, rope]. Over the cache, q [T, heads, rank] -> [T, heads, rank]. Over keys and values
    [T, heads, key + value] that were made, q [T, heads, key + rope] -> [T, heads, value].
    """
    row, first, begin, new, split, splits = block_of(  # pyright: ignore
        tl.program_id(0), rows_ptr, tokens_ptr, starts_ptr, SPLIT
    )
    if row < 0:  # a graph is replayed for a smaller step
        return
    length = tl.load(lens_ptr + row)
    before = length - new
    group: constexpr = FORM.group
    wide: constexpr = FORM.values_wide
    lane = tl.arange(0, BM)
    token, head = lane // group, lane % group  # of this block
    used = (first + token < new) & (tl.program_id(1) * group + head < FORM.heads)
    begin = begin.to(tl.int64)
    q, q_rope = _queries_of(q_ptr, rope_ptr, begin + first, token, head, used[:, None], q_stride, FORM)
    if FORM.page == 0:
        keys_ptr += (begin * FORM.heads + tl.program_id(1)) * (FORM.keys + FORM.values)
        rope_ptr += (begin * (FORM.heads + 1) + FORM.heads) * FORM.rope
    stop = before + tl.minimum(first + BM // group, new)
    low, plain, high = tiles_of(  # pyright: ignore
        first, stop, before, length, split, splits, BN, SPLIT, True, -1, FORM.skipped
    )
    table, seen = table_ptr + row.to(tl.int64) * table_stride, before + first + token
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, wide], tl.float32)
    for start in range(low, plain, BN):
        top, total, result = _add_tile(
            top, total, result, q, q_rope, start, high, seen, table, keys_ptr, rope_ptr, scale, FORM, BN,
            False,
        )  # fmt: skip
    for start in range(plain, high, BN):
        top, total, result = _add_tile(
            top, total, result, q, q_rope, start, high, seen, table, keys_ptr, rope_ptr, scale, FORM, BN,
            True,
        )  # fmt: skip
    places = token * FORM.heads + head
    place = (begin + first) * FORM.heads + tl.program_id(1) * group + places
    own = tl.program_id(0).to(tl.int64) * (BM // group * FORM.heads) + tl.program_id(1) * group + places
    write(
        out_ptr, partial_ptr, logs_ptr, place, own, used, top, total, result, splits, FORM.values, wide, SPLIT
    )


def operations(card: Card) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""

    def latent_attention(
        q: Tensor,
        latent: Tensor,
        up: Tensor,
        cache: Tensor,
        context: ForwardContext,
        cos_sin: Tensor | None,
        *,
        scale: float,
        chosen: Tensor | None = None,
    ) -> Tensor:
        if chosen is not None or not _fits(q, latent, up, cache, cos_sin):
            return latent_ops.latent_attention(
                q, latent, up, cache, context, cos_sin, scale=scale, chosen=chosen
            )
        return _compute(card, q, latent, up, cache, context, cos_sin, scale)

    return {"latent_attention": latent_attention}


def knows(layer: CachedAttention) -> bool:
    """Whether the kernels compute the attention of a layer."""
    return isinstance(layer, LatentAttention) and _known(layer.spec.rank, layer.spec.rope)


def prepared_bytes(layer: CachedAttention, tokens: int, itemsize: int) -> int:
    """The bytes of queries and sums of a step that are as wide as latents, or keys and values that are made.

    0 for other layers.
    """
    if not isinstance(layer, LatentAttention):
        return 0
    spec = layer.spec
    widest = max(2 * spec.rank, spec.nope + spec.value)
    return tokens * (layer.heads.length + 1) * (widest + spec.rope) * itemsize


def _known(rank: int, rope: int) -> bool:
    return rank <= _MOST_RANK and 0 < rope <= _MOST_ROPE


def _fits(q: Tensor, latent: Tensor, up: Tensor, cache: Tensor, cos_sin: Tensor | None) -> bool:
    """Whether the kernels know these widths, and rows and heads lie as they read them."""
    rank = up.shape[2]
    return (
        _known(rank, latent.shape[1] - rank)
        and q.dtype in DTYPES
        and all(x.dtype == q.dtype for x in (latent, up, cache))
        and q.stride()[1:] == (q.shape[2], 1)
        and latent.stride(1) == 1
        and cache.is_contiguous()
        and (cos_sin is None or cos_sin.is_contiguous())
    )


def _compute(
    card: Card,
    q: Tensor,
    latent: Tensor,
    up: Tensor,
    cache: Tensor,
    context: ForwardContext,
    cos_sin: Tensor | None,
    scale: float,
) -> Tensor:
    """The operation for what the kernels know."""
    (tokens, heads, width), (_, each, rank) = q.shape, up.shape
    rope = latent.shape[1] - rank
    nope, value = width - rope, each - width + rope
    group = min(latent_heads(card.capability, q.dtype), power_of_2(heads))
    parts = -(-heads // group)
    form = _form(heads, group, rank, rank, rope, context.block_size, context.first)
    q_rope = torch.empty(tokens, heads + 1, rope, dtype=q.dtype, device=q.device)
    block, warps = heads_at_once(heads, form.rope_wide)
    launch(
        prepare_latent,
        (tokens, -(-heads // block) + 1),
        *(q, latent, q_rope, cache, context.slot_mapping, cos_sin, q.stride(0), latent.stride(0)),
        *(form, nope, block, 0 if cos_sin is None else cos_sin.shape[1]),
        num_warps=warps,
    )
    kind = Heads(parts * group, parts, rank + rope, made=max(nope, value))
    planned = launches_of(card, context, (kind, q.dtype, True))
    made = [blocks for blocks in planned if blocks.kind is Kind.MADE]
    others = [blocks for blocks in planned if blocks.kind is not Kind.MADE]
    out = torch.empty(tokens, heads, value, dtype=q.dtype, device=q.device)
    if others:
        wide = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
        torch.bmm(q[:, :, :nope].transpose(0, 1), up[:, :nope], out=wide.transpose(0, 1))
        sums = empty_results(planned, wide)
        _attend(others, form, wide, q_rope, cache, sums, context, scale)
        torch.bmm(sums.transpose(0, 1), up[:, nope:].transpose(1, 2), out=out.transpose(0, 1))
        del wide, sums
    if made:
        keys = latent[:, :rank] @ up.flatten(0, 1).t()
        form = _form(heads, 1, nope, value, rope, 0, context.first)
        _attend(made, form, q, q_rope, keys, out, context, scale)
    return out


def _form(heads: int, group: int, key: int, value: int, rope: int, page: int, skipped: int) -> LatentForm:
    return LatentForm(heads, group, key, padded(key), value, padded(value), rope, padded(rope), page, skipped)


def _attend(
    planned: Sequence[Launch],
    form: LatentForm,
    q: Tensor,
    q_rope: Tensor,
    keys: Tensor,
    out: Tensor,
    context: ForwardContext,
    scale: float,
) -> None:
    """Compute blocks over the cache, or over keys and values that were made, into out [T, heads, value]."""
    parts, further = -(-form.heads // form.group), (scale * LOG2E, q.stride(0))
    attend_blocks(attend_latent, parts, planned, (q, q_rope, keys), out, context, further, form)
