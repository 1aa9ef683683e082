"""Operations of Gemma 3n: on the streams of a token, side by side in a row, and on gates; in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from models.ops.tree_sum import add_in_pairs


def predict_streams(x: Tensor, routed: Tensor, weight: Tensor) -> Tensor:
    """Add to each of n streams what a token's coefficients make of all of them: x [T, n * F] -> the same.

    routed [T, n]: what the coefficients are made of, by weight [n * n, n] float32. Row k * n + j of it gives
    that with which stream j is added to stream k.
    """
    count = routed.shape[1]
    streams = _wide(x).unflatten(1, (count, -1))
    coefficients = _coefficients(routed, weight).unflatten(1, (count, count))  # [T, to, from]
    total = streams
    for source in range(count):  # one by one, so that a row has the same bits in any batch
        total = total + coefficients[:, :, source, None] * streams[:, source, None]
    return total.flatten(1).to(x.dtype)


def correct_streams(x: Tensor, computed: Tensor, routed: Tensor, weight: Tensor, active: int) -> Tensor:
    """Bring n predicted streams x [T, n * F] nearer to what stream `active` has become -> the same.

    computed [T, F] is that stream as it was computed; routed and weight [n, n] as in `predict_streams`: each
    stream takes 1 and its coefficient of the difference.
    """
    streams = _wide(x).unflatten(1, (routed.shape[1], -1))
    missed = _wide(computed) - streams[:, active]
    coefficients = _coefficients(routed, weight) + 1
    return (streams + coefficients.unsqueeze(-1) * missed.unsqueeze(1)).flatten(1).to(x.dtype)


def sum_rows(x: Tensor, sections: int) -> Tensor:
    """Add up each row of x [T, F] as `sum_squares` adds up its squares -> [T, 1] float32."""
    parts = x.float().unflatten(-1, (sections, -1))
    return add_in_pairs(parts.sum(-1, keepdim=True).unbind(1))


def _coefficients(routed: Tensor, weight: Tensor) -> Tensor:
    """The tangents of routed [T, n], times weight [C, n] -> [T, C], with one order of sums."""
    first, *others = (torch.tanh(_wide(routed)).unsqueeze(1) * weight).unbind(-1)
    return sum(others, first)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
