"""Latent attention by Triton: the operation `latent_attention`, as products with latents themselves.

cuBLAS brings queries to the width of a latent before the kernel, and what it adds up to the width of values
after it. Only for long prompts keys and values of cached tokens are made (`plan.py`), of one row at a time.
The reference computes what the kernels cannot: latents of more than 512 numbers, and tensors that lie
otherwise in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.context import ForwardContext
from models.layers.attention import CachedAttention
from models.layers.latent_attention import LatentAttention
from models.ops import latent_ops
from worker.kernels.cuda.attention import DTYPES, LOG2E, Launch, empty_results, launches, padded
from worker.kernels.cuda.attention_kernel import join
from worker.kernels.cuda.card import Card
from worker.kernels.cuda.latent.kernel import attend_latent, attend_made, prepare_latent
from worker.kernels.cuda.latent.plan import FEW_QUERIES, most_made
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.plan import MOST_SPLITS, Heads, Prompt
from worker.kernels.cuda.tiles import SHORT_ROWS

_MOST_RANK, _MOST_ROPE = 512, 128
"""The widest latent and the widest rotated key."""
_PAGE = 256
"""More tokens than a cache block has."""


def bind(card: Card) -> dict[str, Callable[..., Any]]:
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
    ) -> Tensor:
        if not _fits(q, latent, up, cache, cos_sin):
            return latent_ops.latent_attention(q, latent, up, cache, context, cos_sin, scale=scale)
        (tokens, heads, width), (_, each, rank) = q.shape, up.shape
        nope = width - (latent.shape[1] - rank)
        turned = _prepare(q, latent, cache, context, cos_sin, nope, rank)
        out = torch.empty(tokens, heads, each - nope, dtype=q.dtype, device=q.device)
        parted = _in_parts(heads, latent.shape[1], max(nope, each - nope))
        planned = launches(card, context, (parted, q.dtype, True))
        if few := [blocks for blocks in planned if blocks.prompt is None]:
            wide = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
            torch.bmm(q[:, :, :nope].transpose(0, 1), up[:, :nope], out=wide.transpose(0, 1))
            sums = empty_results(few, wide)
            for blocks in few:
                _run(blocks, parted, wide, turned, cache, sums, context, scale)
            torch.bmm(sums.transpose(0, 1), up[:, nope:].transpose(1, 2), out=out.transpose(0, 1))
        for blocks in planned:
            if blocks.prompt is not None:  # its part of `out` is nobody else's, or is written again
                _run_made(blocks, blocks.prompt, q, turned, up, cache, out, context, scale)
        return out

    return {"latent_attention": latent_attention}


def knows(layer: CachedAttention) -> bool:
    """Whether the kernels compute the attention of a layer."""
    return isinstance(layer, LatentAttention) and _known(layer.spec.rank, layer.spec.rope)


def prepared_bytes(layer: CachedAttention, tokens: int, longest: int, itemsize: int) -> int:
    """The bytes of queries and sums of a step that are as wide as latents, and of what is made of latents.

    `longest`: the tokens of the longest sequence. It is 0 for other layers.
    """
    if not isinstance(layer, LatentAttention):
        return 0
    spec, heads = layer.spec, layer.heads.length
    prepared = tokens * heads * (2 * spec.rank + spec.rope)
    made = most_made(longest, heads) + _PAGE if tokens > FEW_QUERIES else 0
    return (prepared + made * (heads * (spec.nope + spec.value) + spec.rank + spec.rope)) * itemsize


def _in_parts(heads: int, width: int, made: int) -> Heads:
    """The heads, in equal parts that fit the least tile, as if each part had a key head of its own."""
    parts = -(-heads // SHORT_ROWS)
    return Heads(parts * -(-heads // parts), parts, width, latent=True, made=made)


def _known(rank: int, rope: int) -> bool:
    return rank <= _MOST_RANK and 0 < rope <= _MOST_ROPE


def _fits(q: Tensor, latent: Tensor, up: Tensor, cache: Tensor, cos_sin: Tensor | None) -> bool:
    """Whether the kernels know these widths, and rows and heads lie as they read them."""
    rank = up.shape[2]
    rope = latent.shape[1] - rank
    return (
        _known(rank, rope)
        and q.dtype in DTYPES
        and all(x.dtype == q.dtype for x in (latent, up, cache))
        and q.stride()[1:] == (q.shape[2], 1)
        and latent.stride(1) == 1
        and cache.is_contiguous()
        and (cos_sin is None or cos_sin.is_contiguous())
    )


def _prepare(
    q: Tensor,
    latent: Tensor,
    cache: Tensor,
    context: ForwardContext,
    cos_sin: Tensor | None,
    nope: int,
    rank: int,
) -> Tensor:
    """Cache the rows of the step -> the rotated parts of its queries [T, heads, rope]."""
    tokens, heads, width = q.shape
    rope = width - nope
    out = torch.empty(tokens, heads, rope, dtype=q.dtype, device=q.device)
    launch(
        prepare_latent,
        (tokens, heads + 1),
        *(q, latent, out, cache, context.slot_mapping, cos_sin, q.stride(0), latent.stride(0)),
        *(heads, nope, rope, padded(rope), rank, padded(rank)),
        0 if cos_sin is None else cos_sin.shape[1],
        num_warps=1,
    )
    return out


def _run(
    blocks: Launch,
    parted: Heads,
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    out: Tensor,
    context: ForwardContext,
    scale: float,
) -> None:
    """Compute the blocks of one launch: q and out [T, heads, rank], q_rope [T, heads, rope]."""
    (_, heads, rank), rope, table = q.shape, q_rope.shape[2], context.block_table
    tiles, splits, wide = blocks.tiles, blocks.splits, padded(rank)
    each = tiles.queries // parted.group
    partial = logs = None
    if splits > 1:
        places = (len(blocks.rows) * each, heads, splits)
        partial = torch.empty(*places, rank, dtype=torch.float32, device=q.device)
        logs = torch.empty(places, dtype=torch.float32, device=q.device)
    launch(
        attend_latent,
        (len(blocks.rows), parted.keys, splits),
        *(q, q_rope, cache, out, partial, logs, table, context.kv_lens, context.query_starts),
        *(blocks.rows, blocks.tokens, scale * LOG2E, table.stride(0), splits),
        *(heads, parted.group, rank, wide, rope, padded(rope), context.block_size),
        *(tiles.queries, tiles.keys, splits > 1),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        launch(
            join,
            (len(blocks.rows) * each, heads),
            *(partial, logs, out, context.kv_lens, context.query_starts, blocks.rows, blocks.tokens, splits),
            *(heads, rank, wide, each, tiles.keys, MOST_SPLITS, -1),
            num_warps=8 if wide > 128 else 2,
        )


def _run_made(
    blocks: Launch,
    prompt: Prompt,
    q: Tensor,
    q_rope: Tensor,
    up: Tensor,
    cache: Tensor,
    out: Tensor,
    context: ForwardContext,
    scale: float,
) -> None:
    """Make keys and values of all heads for the tokens of one row, and compute its blocks.

    They always take the memory of the longest such row: sizes that vary would leave holes between them.
    """
    (heads, each, rank), (_, _, value), rope = up.shape, out.shape, q_rope.shape[2]
    used, most = (-(-tokens // context.block_size) for tokens in (prompt.total, prompt.most))
    latents = cache.new_empty(most, *cache.shape[1:])[:used]
    torch.index_select(cache, 0, context.block_table[prompt.row, :used], out=latents)
    held = latents.view(-1, rank + rope)  # [K, rank + rope]
    made = cache.new_empty(most * context.block_size, heads * each)[: len(held)]  # [K, heads * each]
    torch.mm(held[:, :rank], up.view(heads * each, rank).t(), out=made)
    nope, tiles = each - value, blocks.tiles
    launch(
        attend_made,
        (len(blocks.rows), heads),
        *(q, q_rope, made, held, out, context.kv_lens, context.query_starts, blocks.rows, blocks.tokens),
        *(scale * LOG2E, q.stride(0), heads, nope, padded(nope), rope, padded(rope), value, padded(value)),
        *(rank, tiles.queries, tiles.keys),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
