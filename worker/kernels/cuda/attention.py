"""Attention by Triton: the operations `attention` and `encoder_attention`.

The reference computes what the kernels cannot: heads wider than 512, and tensors that lie otherwise in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.context import ForwardContext
from models.layers.attention import Attention, CachedAttention
from models.ops import encoder_ops, reference
from models.ops.attention_inputs import CACHE_DTYPES, UNSCALED, CacheScales
from worker.kernels.cuda.attention_kernel import Form, attend, join
from worker.kernels.cuda.attention_plan import Heads, Launch, empty_results, launches_of
from worker.kernels.cuda.capabilities import COUNTERS, SHORT_ROWS, Card
from worker.kernels.cuda.launch import EARLY, begins_early, joined, launch, padded

MOST_DIM, MOST_GROUP = 512, 64
"""The widest head, and the most query heads that share a key head."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2E = 1.4426950408889634
_JOINED = 32
"""The splits that are joined at a time."""
_JOINED_WIDE = {256: {"maxnreg": 168}, 512: {"maxnreg": 64}}
"""What joins wide heads, or 10.0 and 8.0 would keep one and two registers in memory."""


def operations(card: Card) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""

    def attention(
        q: Tensor,
        kv: Tensor,
        context: ForwardContext,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        bias: Tensor | None = None,
        last: Tensor | None = None,
        scales: CacheScales = UNSCALED,
    ) -> Tensor:
        heads = Heads(q.shape[1], kv.shape[2], q.shape[2])
        if not (fits(heads, q) and kv.dtype in (q.dtype, *CACHE_DTYPES.values()) and kv.is_contiguous()):
            limits: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "slopes": slopes, "bias": bias}
            limits |= {"window": window, "scales": scales, "last": last}
            return reference.attention(q, kv, context, scale=scale, **limits)
        of_keys, of_values = (scales.keys, scales.values) if kv.dtype.itemsize == 1 else (1.0, 1.0)
        changed = slopes if bias is None else bias
        scoring = _Scoring(scale * of_keys, window, softcap, changed, sinks, last, value_scale=of_values)
        return _attend(card, heads, q, kv[0], kv[1], context, scoring)

    def encoder_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: ForwardContext,
        *,
        scale: float,
        window: int | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        heads = Heads(q.shape[1], k.shape[1], q.shape[2])
        if not fits(heads, q, k, v):
            limits: dict[str, Any] = {"window": window, "bias": bias, "causal": causal}
            return encoder_ops.encoder_attention(q, k, v, context, scale=scale, **limits)
        added = None if bias is None else bias.to(q.dtype).contiguous()
        if causal and window is not None:
            window += 1  # causal windows have a token's own position in them
        scoring = _Scoring(scale, window, by_distance=added, causal=causal)
        return _attend(card, heads, q, k, v, context, scoring)

    return {"attention": attention, "encoder_attention": encoder_attention}


def knows(layer: CachedAttention) -> bool:
    """Whether the kernels compute the attention of a layer."""
    return isinstance(layer, Attention) and _known(Heads(layer.heads, layer.kv_heads, layer.head_dim))


def split_bytes(card: Card) -> int:
    """An upper bound of the bytes of the results of splits, in float32."""
    rows = 4 * card.processors * max(SHORT_ROWS, MOST_GROUP)  # fewer than 2 * 15 / 8 programs are splits
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
class _Scoring:
    """The options by which scores are made of products, and keys are seen."""

    scale: float
    window: int | None
    softcap: float | None = None
    by_distance: Tensor | None = None
    """What changes scores by distance: slopes [H] float32, or a bias for each distance [H, 2R + 1]."""
    sinks: Tensor | None = None
    last: Tensor | None = None
    """The last positions [T] int32 that tokens see; None: their own."""
    value_scale: float = 1.0
    """What values, and so results, are multiplied with."""
    causal: bool = False
    """Whether a token of a text without a cache sees no later ones; with a cache, none ever does."""

    def form(self, heads: Heads, page: int, skipped: int) -> Form:
        changed = self.by_distance
        return Form(
            heads=heads.keys,
            group=heads.group,
            dim=heads.dim,
            wide=padded(heads.dim),
            page=page,
            window=-1 if self.window is None else self.window,
            capped=self.softcap is not None,
            reach=-1 if changed is None or changed.dim() == 1 else changed.shape[1] // 2,
            sloping=changed is not None and changed.dim() == 1,
            sinks=self.sinks is not None,
            causal=self.causal or page > 0,
            ahead=self.last is not None,
            skipped=skipped,
        )


def _attend(
    card: Card, heads: Heads, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, scoring: _Scoring
) -> Tensor:
    """Compute all blocks. `k` and `v` are [blocks, G, block_size, D], or [T, G, D] of texts."""
    paged, softcap = k.dim() == 4, scoring.softcap
    planned = launches_of(card, context, (heads, q.dtype, paged))
    out = empty_results(planned, q)
    further = (
        *(scoring.by_distance, scoring.sinks, scoring.last),
        *(scoring.scale if softcap else scoring.scale * LOG2E, softcap or 0.0, scoring.value_scale),
        *(q.stride(0), *((0, 0) if paged else (k.stride(0), v.stride(0)))),
    )
    form = scoring.form(heads, context.block_size if paged else 0, context.first)
    attend_blocks(attend, heads.keys, planned, (q, k, v), out, context, further, form, card)
    return out


def attend_blocks(
    kernel: Any,
    programs: int,
    planned: Sequence[Launch],
    inputs: tuple[Tensor, ...],
    out: Tensor,
    context: ForwardContext,
    further: tuple[Any, ...],
    form: Any,
    joins_on: Card | None = None,
) -> None:
    """Compute blocks of queries into out [T, heads, D] by so many programs each, and join splits of keys.

    The results of splits are of the tokens of these splits only: a prompt beside them may have thousands.
    `further`: what the kernel takes behind the plan of the step, before its form. `joins_on`: the card, if
    the kernel can join splits by itself.
    """
    table, (_, heads, dim), wide = context.block_table, out.shape, padded(out.shape[2])
    for blocks in planned:
        tiles, each = blocks.tiles, blocks.tiles.queries // form.group
        partial = logs = None
        if blocks.split:
            places = (blocks.split * each, heads)
            partial = torch.empty(*places, dim, dtype=torch.float32, device=out.device)
            logs = torch.empty(places, dtype=torch.float32, device=out.device)
        counters = None
        if blocks.split and joins_on and len(blocks.rows) * programs <= COUNTERS:
            counters = joined()
        depends = counters is not None and joins_on is not None and begins_early(joins_on)
        launch(
            kernel,
            (len(blocks.rows), programs),
            *(*inputs, out, partial, logs, table, context.kv_lens, context.query_starts),
            *(blocks.rows, blocks.tokens, table.stride(0), *further, *((counters,) if joins_on else ())),
            *(form, tiles.queries, tiles.keys, blocks.split > 0, *((depends,) if joins_on else ())),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **(EARLY if depends else {}),
        )
        if blocks.split and counters is None:
            launch(
                join,
                (blocks.split, heads),
                *(partial, logs, out, context.query_starts, blocks.rows, blocks.tokens),
                *(heads, dim, wide, each, min(_JOINED, 8192 // wide)),
                num_warps=1 if wide <= 64 else 2 if wide <= 256 else 8,
                **_JOINED_WIDE.get(wide, {}),
            )
