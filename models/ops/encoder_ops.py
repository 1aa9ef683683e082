"""Attention of encoders and towers, in plain torch: sequences that are computed whole, without a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.context import ForwardContext


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
    """Attention of packed rows in which a token sees all of its sequence, which is all in this step.

    q [T, H, D]; k, v [T, G, D] -> [T, H, D]. With a window, a token sees so many positions on each side of
    it; if it is causal, none after it. bias [H, 2R + 1] is added to the scores: the entry R + d where the key
    stands d after the query, and those at the ends where it stands more than R away.
    """
    bias = None if bias is None else bias.to(q.dtype)
    out = torch.empty_like(q)
    start = 0
    for length in context.query_lens_host:
        rows = slice(start, start + length)
        queries, keys, values = (x[rows].transpose(0, 1) for x in (q, k, v))  # [H or G, length, D]
        heads = _attend_around(queries, keys, values, scale, window, bias, causal)
        out[rows] = heads.transpose(0, 1)
        start += length
    return out


def attend_to_seen(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ForwardContext,
    *,
    scale: float,
    window: int | None,
    bias: Tensor | None,
) -> None:
    """Compute anew, in `out` [T, H, D], the sequences of which some tokens are seen by none.

    There are few, and short ones, so no device has an operation of its own for it.
    """
    bias = None if bias is None else bias.to(q.dtype)
    start = 0
    for length, seen in zip(context.query_lens_host, context.seen or (), strict=True):
        rows, keys = slice(start, start + length), slice(start, start + seen)
        start += length
        if seen == length:
            continue
        distance = distance_between(range(length), range(seen), q.device)
        near = distance.abs() <= (length if window is None else window)
        mask = near if bias is None else _added(distance, bias).masked_fill(~near, float("-inf"))
        queries, visible, values = (x.transpose(0, 1).contiguous() for x in (q[rows], k[keys], v[keys]))
        out[rows] = _attend_masked(queries, visible, values, mask, scale).transpose(0, 1)


_QUERIES = 256
"""The number of queries that are computed at a time, with the keys they can see, if there is a window."""


def _attend_around(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    bias: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attention within one sequence: [H, L, D] -> [H, L, D]."""
    length = q.shape[1]
    window = length if window is None else window
    if not causal and window >= length - 1:
        added = (
            None if bias is None else _added(distance_between(range(length), range(length), q.device), bias)
        )
        return _attend_masked(q, keys, values, added, scale)
    pieces: list[Tensor] = []
    for start in range(0, length, _QUERIES):
        mine = range(start, min(length, start + _QUERIES))
        seen = range(max(0, mine.start - window), min(length, mine.stop + window))
        distance = distance_between(mine, seen, q.device)
        near = (distance.abs() <= window) & (distance <= 0 if causal else True)
        mask = near if bias is None else _added(distance, bias).masked_fill(~near, float("-inf"))
        queries, visible = q[:, mine.start : mine.stop], slice(seen.start, seen.stop)
        pieces.append(_attend_masked(queries, keys[:, visible], values[:, visible], mask, scale))
    return torch.cat(pieces, dim=1)


def _added(distance: Tensor, bias: Tensor) -> Tensor:
    """The values [1, H, queries, keys] that are added to the scores."""
    reach = bias.shape[1] // 2
    return bias[None, :, distance.clamp(-reach, reach) + reach]


def _attend_masked(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )[0]


def distance_between(queries: range, keys: range, device: torch.device) -> Tensor:
    """The distances [queries, keys]: positions by which each key stands after each query."""
    query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    return torch.arange(keys.start, keys.stop, device=device) - query
