"""Latent attention by Triton: the operation `latent_attention`, as products with latents themselves.

cuBLAS brings queries to the width of a latent before the kernel, and what it adds up to the width of values
after it: nothing is made for each cached token. The reference computes what the kernels cannot: latents of
more than 512 numbers, and tensors that lie otherwise in memory.
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
from worker.kernels.cuda.attention import DTYPES, LOG2E, SplitResults, padded
from worker.kernels.cuda.attention_plan import Heads, empty_results, launches_of
from worker.kernels.cuda.capabilities import SHORT_ROWS, Card
from worker.kernels.cuda.latent_kernel import LatentForm, attend_latent, prepare_latent
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.rotary import heads_at_once

_MOST_RANK, _MOST_ROPE = 512, 128
"""The widest latent and the widest rotated key."""


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
        (tokens, heads, width), (_, each, rank) = q.shape, up.shape
        rope = latent.shape[1] - rank
        nope = width - rope
        parts = _in_parts(heads, rank + rope)
        form = LatentForm(heads, parts.group, rank, padded(rank), rope, padded(rope), context.block_size)
        q_rope = torch.empty(tokens, heads, rope, dtype=q.dtype, device=q.device)
        block, warps = heads_at_once(heads, form.rope_wide)
        launch(
            prepare_latent,
            (tokens, -(-heads // block) + 1),
            *(q, latent, q_rope, cache, context.slot_mapping, cos_sin, q.stride(0), latent.stride(0)),
            *(form, nope, block, 0 if cos_sin is None else cos_sin.shape[1]),
            num_warps=warps,
        )
        wide = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
        torch.bmm(q[:, :, :nope].transpose(0, 1), up[:, :nope], out=wide.transpose(0, 1))
        sums = _attend(card, parts, form, wide, q_rope, cache, context, scale)
        out = torch.empty(tokens, heads, each - nope, dtype=q.dtype, device=q.device)
        torch.bmm(sums.transpose(0, 1), up[:, nope:].transpose(1, 2), out=out.transpose(0, 1))
        return out

    return {"latent_attention": latent_attention}


def knows(layer: CachedAttention) -> bool:
    """Whether the kernels compute the attention of a layer."""
    return isinstance(layer, LatentAttention) and _known(layer.spec.rank, layer.spec.rope)


def prepared_bytes(layer: CachedAttention, tokens: int, itemsize: int) -> int:
    """The bytes of queries and sums of a step that are as wide as latents; 0 for other layers."""
    if not isinstance(layer, LatentAttention):
        return 0
    return tokens * layer.heads.length * (2 * layer.spec.rank + layer.spec.rope) * itemsize


def _in_parts(heads: int, width: int) -> Heads:
    """The heads, in equal parts that fit the least tile, as if each part had a key head of its own."""
    parts = -(-heads // SHORT_ROWS)
    return Heads(parts * -(-heads // parts), parts, width, latent=True)


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


def _attend(
    card: Card,
    parts: Heads,
    form: LatentForm,
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    context: ForwardContext,
    scale: float,
) -> Tensor:
    """Compute all blocks: q [T, heads, rank] and q_rope [T, heads, rope] -> [T, heads, rank]."""
    planned, table = launches_of(card, context, (parts, q.dtype, True)), context.block_table
    out = empty_results(planned, q)
    for blocks in planned:
        tiles, splits = blocks.tiles, blocks.splits
        results = SplitResults.of(blocks, parts.group, q)
        launch(
            attend_latent,
            (len(blocks.rows), parts.keys, splits),
            *(q, q_rope, cache, out, *results.tensors, table, context.kv_lens, context.query_starts),
            *(blocks.rows, blocks.tokens, scale * LOG2E, table.stride(0), splits),
            *(form, tiles.queries, tiles.keys, splits > 1),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        results.join_into(out, context, window=-1)
    return out
