"""Latent attention by Triton: the operation `latent_attention`, as products with latents themselves.

cuBLAS brings queries to the width of a latent before the kernel, and what it adds up to the width of values
after it: nothing is made for each cached token. For prompts that begin in a step it makes keys and values of
all heads instead, for the step's tokens. The reference computes what the kernels cannot: latents of
more than 512 numbers, and tensors that lie otherwise in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from models.context import ForwardContext
from models.layers.attention import CachedAttention
from models.layers.latent_attention import LatentAttention
from models.ops import latent_ops
from worker.kernels.cuda.attention import DTYPES, LOG2E, SplitResults, padded
from worker.kernels.cuda.attention_plan import Heads, Kind, Launch, empty_results, launches_of
from worker.kernels.cuda.capabilities import Card, latent_heads
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
    group = min(latent_heads(card.capability, q.dtype), 1 << (heads - 1).bit_length())
    parts = -(-heads // group)
    form = _form(heads, group, rank, rank, rope, context.block_size)
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
        _attend(made, _form(heads, 1, nope, value, rope, 0), q, q_rope, keys, out, context, scale)
    return out


def _form(heads: int, group: int, key: int, value: int, rope: int, page: int) -> LatentForm:
    return LatentForm(heads, group, key, padded(key), value, padded(value), rope, padded(rope), page)


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
    table = context.block_table
    for blocks in planned:
        tiles = blocks.tiles
        results = SplitResults.of(blocks, form.group, out)
        launch(
            attend_latent,
            (len(blocks.rows), -(-form.heads // form.group)),
            *(q, q_rope, keys, out, *results.tensors, table, context.kv_lens, context.query_starts),
            *(blocks.rows, blocks.tokens, scale * LOG2E, q.stride(0), table.stride(0)),
            *(form, tiles.queries, tiles.keys, blocks.split > 0),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        results.join_into(out, context)
