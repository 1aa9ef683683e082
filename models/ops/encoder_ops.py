"""Attention of encoders and towers, in plain torch: sequences that are computed whole, without a cache."""

from __future__ import annotations

from dataclasses import dataclass

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
        mask = near if bias is None else by_distance(distance, bias).masked_fill(~near, float("-inf"))
        queries, visible, values = (x.transpose(0, 1).contiguous() for x in (q[rows], k[keys], v[keys]))
        out[rows] = _attend_masked(queries, visible, values, mask, scale).transpose(0, 1)


@dataclass(frozen=True)
class Distances:
    """Learned distances between tokens, in the heads of a layer."""

    keys: Tensor | None
    """[H, rows, D]: with which queries are compared; None: they are not."""
    queries: Tensor | None
    """The same, with which keys are compared."""
    rows: Tensor
    """[2L - 1] int32, on the host, for texts of up to L tokens: the row for each distance of a query from a
    key, rising."""


def disentangled_attention(
    q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, distances: Distances, *, scale: float
) -> Tensor:
    """Attention of packed rows, as `encoder_attention`, by tokens and by their distances (DeBERTa).

    The score of two tokens is the product of query and key, and of each with the distance between them.
    q, k, v [T, H, D] -> [T, H, D].
    """
    out = torch.empty_like(q)
    start, middle = 0, len(distances.rows) // 2
    indices: dict[int, tuple[slice, Tensor]] = {}
    for length in context.query_lens_host:
        if length not in indices:
            near = distances.rows[middle - length + 1 : middle + length]
            first, last = int(near[0]), int(near[-1])
            at = distance_between(range(length), range(length), torch.device("cpu"))
            indices[length] = slice(first, last + 1), (near[length - 1 - at] - first).long().to(q.device)
        held, index = indices[length]
        rows = slice(start, start + length)
        queries, keys, values = (x[rows].transpose(0, 1) for x in (q, k, v))  # [H, L, D]
        index = index.expand(len(queries), -1, -1)
        added = torch.zeros((), dtype=q.dtype, device=q.device)
        if distances.keys is not None:
            added = added + (queries @ distances.keys[:, held].transpose(1, 2)).gather(2, index)
        if distances.queries is not None:
            products = (keys @ distances.queries[:, held].transpose(1, 2)).gather(2, index.transpose(1, 2))
            added = added + products.transpose(1, 2)
        out[rows] = _attend_masked(queries, keys, values, added[None] * scale, scale).transpose(0, 1)
        start += length
    return out


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
        whole = range(length)
        added = None if bias is None else by_distance(distance_between(whole, whole, q.device), bias)
        return _attend_masked(q, keys, values, added, scale)
    pieces: list[Tensor] = []
    for start in range(0, length, _QUERIES):
        mine = range(start, min(length, start + _QUERIES))
        seen = range(max(0, mine.start - window), min(length, mine.stop + window))
        distance = distance_between(mine, seen, q.device)
        near = (distance.abs() <= window) & (distance <= 0 if causal else True)
        mask = near if bias is None else by_distance(distance, bias).masked_fill(~near, float("-inf"))
        queries, visible = q[:, mine.start : mine.stop], slice(seen.start, seen.stop)
        pieces.append(_attend_masked(queries, keys[:, visible], values[:, visible], mask, scale))
    return torch.cat(pieces, dim=1)


def by_distance(distance: Tensor, bias: Tensor) -> Tensor:
    """The values [H, queries, keys] that are added to the scores."""
    reach = bias.shape[1] // 2
    return bias[:, distance.clamp(-reach, reach) + reach]


def _attend_masked(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )[0]


def distance_between(queries: range, keys: range, device: torch.device) -> Tensor:
    """The distances [queries, keys]: positions by which each key stands after each query."""
    query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    return torch.arange(keys.start, keys.stop, device=device) - query


def patches(pixels: Tensor, levels: Tensor, side: int, *, depth: int = 1, merge: int = 1) -> Tensor:
    """Cut frames into square patches of normalised numbers: [F, height, width, 3] uint8 -> [P, numbers].

    levels [3, 256]: the number that stands for each value of each channel. A patch has the numbers of `side`
    rows and columns of `depth` frames, by channel, frame, row and column; the last frame is repeated where
    frames are missing. Patches come frame by frame and row by row, or with `merge` square by square of so
    many rows and columns of patches. Pixels beyond the last whole patch, or square, are left out.
    """
    if missing := -len(pixels) % depth:
        pixels = torch.cat([pixels, *[pixels[-1:]] * missing])
    square = side * merge
    rows, columns = pixels.shape[1] // square, pixels.shape[2] // square
    whole = pixels[:, : rows * square, : columns * square]
    cut = whole.reshape(-1, depth, rows, merge, side, columns, merge, side, 3)
    ordered = cut.permute(
        0, 2, 5, 3, 6, 8, 1, 4, 7
    )  # frames, square, patch in it, channel, depth, row, column
    codes = ordered.reshape(-1, 3, depth * side * side).int()
    codes += torch.arange(0, 3 * 256, 256, dtype=torch.int32, device=pixels.device).unsqueeze(-1)
    return levels.flatten().index_select(0, codes.flatten()).view(len(codes), -1)
