"""References of attention to a cache that is cut over ranks: states of chunks of keys, and their join."""

from __future__ import annotations

from math import e, log2

import torch
from torch import Tensor

from models.context import ForwardContext
from models.ops.attention_inputs import CODES, rounded_queries, widened
from models.ops.reference import gather_cached

CHUNK = 256
"""The keys of a chunk, as in `csrc/attention_tile.h`: their sums are added in the order of positions."""
_LOG2_E = log2(e)


def attention_states(
    q: Tensor, kv: Tensor, context: ForwardContext, *, scale: float, softcap: float | None = None
) -> Tensor:
    """The states of chunks of keys for rows of one token, which see all of their keys; a row may have none.

    q [R, H, D] and kv [2, blocks, G, block_size, D] are those of `attention` -> [R, G, chunks, H / G, D + 2]
    float32: of each chunk the largest score, as an exponent of 2, the sum of weights relative to it, and the
    weighted sum of values. What lies behind a row's last chunk may be anything.
    """
    (rows, heads, dim), groups = q.shape, kv.shape[2]
    chunks = -(-max(context.kv_lens_host, default=0) // CHUNK)
    states = torch.zeros(rows, groups, chunks, heads // groups, dim + 2, device=q.device)
    queries = rounded_queries(q) if kv.dtype == CODES else q
    for row, length in enumerate(context.kv_lens_host):
        if not length:
            continue
        gathered = gather_cached(kv, context.block_table[row], 0, length)
        keys, values = (widened(each, q.dtype).float() for each in gathered)  # [G, K, D]
        scores = queries[row].float().view(groups, -1, dim) @ keys.transpose(1, 2) * scale  # [G, H / G, K]
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        parts = (scores * _LOG2_E).split(CHUNK, 2), values.split(CHUNK, 1)
        for chunk, (part, value) in enumerate(zip(*parts, strict=True)):
            largest = part.amax(2, keepdim=True)
            weights = torch.exp2(part - largest)
            states[row, :, chunk] = torch.cat([largest, weights.sum(2, keepdim=True), weights @ value], 2)
    return states


def join_states(states: Tensor, counts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """The results of attention from all of a row's chunks: [H, R, chunks, D + 2] -> [R, H, D] in `dtype`.

    counts [R] int32: how many chunks each row has, 1 at least. sinks [H] are those of `attention`. `states`
    are overwritten.
    """
    there = torch.arange(states.shape[2], device=states.device) < counts[:, None]  # [R, chunks]
    scores = states[..., 0].where(there, -torch.inf)
    largest = scores.amax(2, keepdim=True)  # [H, R, 1]
    if sinks is not None:
        largest = largest.maximum(sinks[:, None, None] * _LOG2_E)
    weights = torch.exp2(scores - largest)
    total = (weights * states[..., 1].where(there, 0)).sum(2, keepdim=True)
    if sinks is not None:
        total = total + torch.exp2(sinks[:, None, None] * _LOG2_E - largest)
    sums = (weights[..., None] * states[..., 2:].where(there[..., None], 0)).sum(2)  # [H, R, D]
    return (sums / total).transpose(0, 1).to(dtype).contiguous()
