"""The operations of latent attention in plain torch: the specification of each faster kernel.

A token's keys and values of all heads are made from one short vector, its latent, by a matrix; the cache
holds that vector and one rotated key that all heads share. T tokens of a step, R numbers of a latent. The
query of a head has a part without positions, `nope` wide, and behind it a rotated one, `rope` wide; values
may be of another width. An indexer may have chosen which tokens attention reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.context import ForwardContext
from models.ops.grouped_matrix import Matrix, widen
from models.ops.reference import rms_norm, rotate

_MOST_ROWS = 512
_MOST_SCORES = 1 << 24
"""The most cached rows whose keys and values are made at a time, to save memory, and the most scores."""


def front_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the first numbers of each row of x [T, F], as many as there are weights; the others pass."""
    front, others = x.split([len(weight), x.shape[-1] - len(weight)], dim=-1)
    return torch.cat([rms_norm(front, weight, eps), others], dim=-1)


def pack_latent(weight: Matrix, heads: int, nope: int, rank: int) -> Tensor:
    """Bring the matrix [heads * (nope + value), rank] into what `latent_attention` reads, after loading.

    Head by head it has the rows that make the key's part without positions, then those that make values. What
    is quantized is widened here.
    """
    matrix = widen(weight)
    each, rest = divmod(len(matrix), heads)
    if rest or each <= nope or matrix.shape[1] != rank:
        raise ValueError(
            f"a matrix {tuple(matrix.shape)} does not make keys of {nope} and values for {heads} heads from "
            f"{rank} numbers"
        )
    return matrix.contiguous().view(heads, each, rank)


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
    """Cache the rows of this step, then attend: q [T, heads, nope + rope] -> [T, heads, value].

    latent [T, R + rope]: the normed latent, then the shared key. `up` as `pack_latent` returned it. cache
    [blocks, block_size, R + rope]: a row for each slot, as in `latent`, but with the key rotated. `cos_sin`
    [T, rope] as `rotate` reads it turns that key and the last `rope` numbers of each query; None: nothing is
    turned. Causal as `attention` is, and nothing beyond a sequence's end is used. Keys and values are made of
    every cached row that a sequence sees, and all sums are in float32. `chosen` [T, most], as `choose_tokens`
    returned it, says which of these rows each token reads; None means all.
    """
    rank = up.shape[-1]
    rope = latent.shape[-1] - rank
    if cos_sin is not None:
        plain, turned = q.split([q.shape[-1] - rope, rope], dim=-1)
        q = torch.cat([plain, rotate(turned, cos_sin)], dim=-1)
        key = rotate(latent[:, None, rank:], cos_sin).squeeze(1)
        latent = torch.cat([latent[:, :rank], key], dim=-1)
    size = context.block_size
    cache[context.slot_mapping // size, context.slot_mapping % size] = latent.to(cache.dtype)
    wide = torch.promote_types(q.dtype, torch.float32)
    up = up.to(wide)
    pieces: list[Tensor] = []
    start = 0
    for row, (new, total) in enumerate(zip(context.query_lens_host, context.kv_lens_host, strict=True)):
        blocks = context.block_table[row, : -(-total // size)]
        held = cache.index_select(0, blocks).flatten(0, 1)[:total].to(wide)
        own = None if chosen is None else _marked(chosen[start : start + new], total)
        own = _seen(new, total, context.first, q.device) if context.first else own
        pieces.append(_attend(q[start : start + new].to(wide), held, up, scale, own))
        start += new
    return torch.cat(pieces).to(q.dtype)


def choose_tokens(
    q: Tensor,
    key: Tensor,
    weights: Tensor,
    cache: Tensor,
    context: ForwardContext,
    cos_sin: Tensor | None,
    *,
    most: int,
) -> Tensor:
    """Cache an indexer's keys of this step, then choose what each token attends to -> [T, most] int32.

    q [T, heads, F] and key [T, F], of which `cos_sin` [T, rope] turns the first numbers; weights [T, heads]
    float32; cache [blocks, block_size, F]. The score of a token is the sum over heads of
    weight * max(q . key, 0), in float32. A row has the positions of the `most` highest scores up to the
    token's own, in ascending order, and -1 behind them where there are fewer. Of equal scores earlier ones
    are chosen.
    """
    if cos_sin is not None:
        rope = cos_sin.shape[-1]
        q = torch.cat([rotate(q[..., :rope], cos_sin), q[..., rope:]], dim=-1)
        key = torch.cat([rotate(key[:, None, :rope], cos_sin).squeeze(1), key[:, rope:]], dim=-1)
    size, heads = context.block_size, q.shape[1]
    cache[context.slot_mapping // size, context.slot_mapping % size] = key.to(cache.dtype)
    wide = torch.promote_types(q.dtype, torch.float32)
    chosen: list[Tensor] = []
    start = 0
    for row, (new, total) in enumerate(zip(context.query_lens_host, context.kv_lens_host, strict=True)):
        blocks = context.block_table[row, : -(-total // size)]
        held = cache.index_select(0, blocks).flatten(0, 1)[:total].to(wide)
        tokens = torch.arange(start, start + new, device=q.device)
        for some in tokens.split(max(1, _MOST_SCORES // (heads * total))):
            products = (q[some].to(wide) @ held.T).relu()  # [n, heads, total]
            scores = (weights[some].to(wide)[:, None] @ products).squeeze(1)
            chosen.append(_highest(scores, some - start + total - new, most))
        start += new
    return torch.cat(chosen)


def _highest(scores: Tensor, last: Tensor, most: int) -> Tensor:
    """Choose of scores [n, total] those up to the positions `last` [n] -> [n, most] int32."""
    total = scores.shape[1]
    positions = torch.arange(total, device=scores.device)
    scores = scores.masked_fill(positions > last[:, None], float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :most]
    best = best.masked_fill(best > last[:, None], total).sort(dim=-1).values
    best = best.masked_fill(best == total, -1)
    return torch.nn.functional.pad(best, (0, most - best.shape[1]), value=-1).int()


def _marked(chosen: Tensor, total: int) -> Tensor:
    """Positions [new, most], and -1 for none -> [new, total], True where a position is among them."""
    marks = torch.zeros(len(chosen), total + 1, dtype=torch.bool, device=chosen.device)
    return marks.scatter(1, chosen.long() % (total + 1), value=True)[:, :total]


def _seen(new: int, total: int, first: int, device: torch.device) -> Tensor:
    """The positions [new, total] that the last tokens see: their own, and those before from `first` on."""
    keys = torch.arange(total, device=device)
    own = keys[total - new :, None]
    return (keys == own) | ((keys <= own) & (keys >= first))


def _attend(q: Tensor, held: Tensor, up: Tensor, scale: float, chosen: Tensor | None) -> Tensor:
    """Attention of the last tokens of one sequence: q [new, heads, nope + rope] -> [new, heads, value].

    Scores come piece by piece, so what has been added up is scaled down whenever one is the highest so far.
    `chosen` [new, total] is True for the rows that a token reads; None means all up to its own.
    """
    heads, each, rank = up.shape
    nope = q.shape[-1] - (held.shape[1] - rank)
    new, total = len(q), len(held)
    queries = q.transpose(0, 1)  # [heads, new, nope + rope]
    highest = q.new_full((heads, new, 1), torch.finfo(q.dtype).min)  # none of a piece may have been chosen
    weight = q.new_zeros(heads, new, 1)
    sums = q.new_zeros(heads, new, each - nope)
    positions = torch.arange(total, device=q.device)
    last = positions[total - new :].unsqueeze(1)  # the last position that each query sees
    size = min(_MOST_ROWS, max(16, _MOST_SCORES // (heads * new)))
    for rows, at in zip(held.split(size), positions.split(size), strict=True):
        made, values = (rows[:, :rank] @ up.transpose(1, 2)).split([nope, each - nope], dim=-1)
        keys = torch.cat([made, rows[:, rank:].expand(heads, -1, -1)], dim=-1)
        unread = at > last if chosen is None else ~chosen[:, at]
        scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(unread, float("-inf"))
        top = torch.maximum(highest, scores.amax(-1, keepdim=True))
        shrunk, shares = (highest - top).exp(), (scores - top).exp()
        weight = weight * shrunk + shares.sum(-1, keepdim=True)
        sums = sums * shrunk + shares @ values
        highest = top
    return (sums / weight).transpose(0, 1)
