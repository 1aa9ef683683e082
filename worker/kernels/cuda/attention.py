"""Attention by Triton: the operations `attention` and `encoder_attention`.

Blocks of queries are planned once for a step and kept in its context, where all layers find them. The
reference computes what the kernels cannot: heads wider than 256, and tensors that lie otherwise in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.context import ForwardContext
from models.layers.attention import Attention, CachedAttention
from models.ops import reference
from models.ops.attention_inputs import CACHE_DTYPES, UNSCALED, CacheScales
from worker.kernels.cuda.attention_kernel import attend, join
from worker.kernels.cuda.card import Card
from worker.kernels.cuda.latent.plan import plan_latents
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.plan import (
    MOST_SPLITS,
    Blocks,
    Heads,
    Prompt,
    Room,
    plan_prompts_and_decodes,
    plan_texts,
    room_for_prompts_and_decodes,
    room_for_texts,
)
from worker.kernels.cuda.tiles import SHORT_ROWS, Tiles, attention_tiles, latent_tiles

MOST_DIM, MOST_GROUP = 256, 64
"""The widest head, and the most query heads that share a key head."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Launch:
    """Blocks of queries on the device."""

    rows: Tensor  # [N] int32
    tokens: Tensor  # [N] int32
    splits: int
    tiles: Tiles
    padded: bool = False
    """Whether the step has tokens that are in no block, because they were filled up. Their results are 0."""
    prompt: Prompt | None = None
    """The one row of these blocks, if keys and values of all heads are made of its latents."""

    @classmethod
    def of(cls, blocks: Blocks, tiles: Tiles, send: Callable[[np.ndarray], Tensor]) -> Launch:
        return cls(send(blocks.rows), send(blocks.tokens), blocks.splits, tiles, prompt=blocks.prompt)


PlanKey = tuple[Heads, torch.dtype, bool]
"""Heads, their number type, and whether sequences have a cache."""


def plan_step(
    card: Card, key: PlanKey, new: Sequence[int], total: Sequence[int], longest: int
) -> list[tuple[Blocks, Tiles]]:
    """The blocks of a step for one kind of heads, on the host. `longest`: the most tokens of any row."""
    heads, dtype, paged = key
    if heads.latent:
        return plan_latents(new, total, heads, dtype, card.capability, card.processors, longest)
    short, long = _tiles(card, key)
    if not paged:
        return [(blocks, long) for blocks in plan_texts(new, heads, long)]
    planned = plan_prompts_and_decodes(new, total, heads, short, long, card.processors)
    return [(blocks, short if blocks.short else long) for blocks in planned]


def plan_room(card: Card, key: PlanKey, tokens: int, rows: int, longest: int) -> list[tuple[Room, Tiles]]:
    """The launches that take the blocks of any step of up to so many tokens of so many rows."""
    heads, _, paged = key
    short, long = _tiles(card, key)
    if not paged:
        return [(room, long) for room in room_for_texts(tokens, rows, heads, long)]
    rooms = room_for_prompts_and_decodes(tokens, rows, longest, heads, long, card.processors)
    return [(room, short if room.short else long) for room in rooms]


def _tiles(card: Card, key: PlanKey) -> tuple[Tiles, Tiles]:
    """The tiles of blocks of few rows, and of large ones."""
    heads, dtype, _ = key
    if heads.latent:
        return latent_tiles(dtype, short=True), latent_tiles(dtype, short=False)
    capability, dim, group = card.capability, heads.dim, heads.group
    short = attention_tiles(capability, dtype, dim, group, short=True)
    return short, attention_tiles(capability, dtype, dim, group, short=False)


def launches(card: Card, context: ForwardContext, key: PlanKey) -> list[Launch]:
    """The launches of a step for one kind of heads. Those that nobody has sent with the step are sent now."""
    if context.plan is None:
        context.plan = {}
    plan: dict[PlanKey, list[Launch]] = context.plan
    if key not in plan:
        target, new, total = context.query_starts.device, context.query_lens_host, context.kv_lens_host
        plan[key] = [
            Launch.of(blocks, tiles, lambda numbers: _sent(numbers, target))
            for blocks, tiles in plan_step(card, key, new, total, max(total))
        ]
    return plan[key]


def empty_results(planned: Sequence[Launch], q: Tensor) -> Tensor:
    """Memory for the results of launches, in the shape of queries [T, heads, D]."""
    make = torch.zeros if any(blocks.padded for blocks in planned) else torch.empty
    return make(q.shape, dtype=q.dtype, device=q.device)


def _sent(numbers: Any, target: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for what is queued there."""
    host = torch.from_numpy(numbers)
    return host.pin_memory().to(target, non_blocking=True) if target.type == "cuda" else host.to(target)


def bind(card: Card) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""
    return {"attention": _attention(card), "encoder_attention": _encoder_attention(card)}


def _attention(card: Card) -> Callable[..., Tensor]:
    def attention(
        q: Tensor,
        kv: Tensor,
        context: ForwardContext,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scales: CacheScales = UNSCALED,
    ) -> Tensor:
        heads = Heads(q.shape[1], kv.shape[2], q.shape[2])
        if not (fits(heads, q) and kv.dtype in (q.dtype, *CACHE_DTYPES.values()) and kv.is_contiguous()):
            return reference.attention(
                q, kv, context, scale=scale, window=window, softcap=softcap, sinks=sinks, scales=scales
            )
        of_keys, of_values = (scales.keys, scales.values) if kv.dtype.itemsize == 1 else (1.0, 1.0)
        planned = launches(card, context, (heads, q.dtype, True))
        out = empty_results(planned, q)
        for blocks in planned:
            limits = _Limits(scale * of_keys, window, softcap, sinks=sinks, value_scale=of_values)
            _run(blocks, heads, q, kv[0], kv[1], out, context, limits)
        return out

    return attention


def _encoder_attention(card: Card) -> Callable[..., Tensor]:
    def encoder_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: ForwardContext,
        *,
        scale: float,
        window: int | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        heads = Heads(q.shape[1], k.shape[1], q.shape[2])
        if not fits(heads, q, k, v):
            return reference.encoder_attention(q, k, v, context, scale=scale, window=window, bias=bias)
        added = None if bias is None else bias.to(q.dtype).contiguous()
        planned = launches(card, context, (heads, q.dtype, False))
        out = empty_results(planned, q)
        for blocks in planned:
            _run(blocks, heads, q, k, v, out, context, _Limits(scale, window, bias=added))
        return out

    return encoder_attention


def knows(layer: CachedAttention) -> bool:
    """Whether the kernels compute the attention of a layer."""
    return isinstance(layer, Attention) and _known(Heads(layer.heads, layer.kv_heads, layer.head_dim))


def split_bytes(card: Card) -> int:
    """An upper bound of the bytes of the results of splits, in float32."""
    rows = 4 * card.processors * max(SHORT_ROWS, MOST_GROUP)  # splits double while there are too few programs
    return 4 * rows * (1 + MOST_DIM)


def _known(heads: Heads) -> bool:
    return heads.dim <= MOST_DIM and heads.queries % heads.keys == 0 and heads.group <= MOST_GROUP


def fits(heads: Heads, *tensors: Tensor) -> bool:
    """Whether the kernels know these heads, which lie one after the other in each token's row."""
    return _known(heads) and all(
        x.dtype == tensors[0].dtype and x.dtype in DTYPES and x.stride()[1:] == (heads.dim, 1)
        for x in tensors
    )


@dataclass(frozen=True, slots=True)
class _Limits:
    """How scores are made of products, and which keys are seen."""

    scale: float
    window: int | None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    value_scale: float = 1.0
    """What values, and so results, are multiplied with."""


def _run(
    blocks: Launch,
    heads: Heads,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    context: ForwardContext,
    limits: _Limits,
) -> None:
    """Compute the blocks of one launch. `k` and `v` are [blocks, G, block_size, D], or [T, G, D] of texts."""
    paged, tiles, splits, table = k.dim() == 4, blocks.tiles, blocks.splits, context.block_table
    wide, window = padded(heads.dim), -1 if limits.window is None else limits.window
    softcap, bias, sinks = limits.softcap, limits.bias, limits.sinks
    partial = logs = None
    each = tiles.queries // heads.group
    if splits > 1:  # for the tokens of these blocks only: a prompt beside them may have thousands
        places = (len(blocks.rows) * each, heads.queries, splits)
        partial = torch.empty(*places, heads.dim, dtype=torch.float32, device=q.device)
        logs = torch.empty(places, dtype=torch.float32, device=q.device)
    launch(
        attend,
        (len(blocks.rows), heads.keys, splits),
        *(q, k, v, out, partial, logs, bias, sinks, table, context.kv_lens, context.query_starts),
        *(blocks.rows, blocks.tokens, limits.scale if softcap else limits.scale * LOG2E),
        *(softcap or 0.0, limits.value_scale, q.stride(0)),
        *((0, 0) if paged else (k.stride(0), v.stride(0))),
        *(table.stride(0), splits),
        *(heads.keys, heads.group, heads.dim, wide, context.block_size if paged else 0),
        *(tiles.queries, tiles.keys, splits > 1, paged, window),
        *(softcap is not None, -1 if bias is None else bias.shape[1] // 2, sinks is not None),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        launch(
            join,
            (len(blocks.rows) * each, heads.queries),
            *(partial, logs, out, context.kv_lens, context.query_starts, blocks.rows, blocks.tokens, splits),
            *(heads.queries, heads.dim, wide, each, tiles.keys, MOST_SPLITS, window),
            num_warps=1 if wide <= 64 else 2,
        )


def padded(size: int) -> int:
    """The power of two, at least 16, that a tile takes for so many numbers."""
    return max(16, 1 << (size - 1).bit_length())
