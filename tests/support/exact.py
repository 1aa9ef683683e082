"""Operations of models in float64, by their definitions or by torch, for kernels to be compared with.

Nothing of the code under test is used, and what must not be read may be NaN: only what counts is looked at.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from models.context import ForwardContext


def attention(
    q: Tensor,
    kv: Tensor,
    step: ForwardContext,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Queries [T, H, D] of a step, and keys and values [2, blocks, G, size, D] -> [T, H, D]."""
    pieces: list[Tensor] = []
    rows = zip(step.block_table.long(), step.query_lens_host, step.kv_lens_host, strict=True)
    for row, (table, new, total) in enumerate(rows):
        first, held = int(step.query_starts[row]), torch.arange(total, device=q.device)
        keys, values = kv[:, table[held // step.block_size], :, held % step.block_size].unbind(1)
        distance = held[None, :] - held[total - new :, None]  # from each query to each key
        seen = distance <= 0 if last is None else held[None, :] <= last[first : first + new, None]
        if window is not None:
            seen &= distance > -window
        added = None if slopes is None else slopes.double()[:, None, None] * distance
        added = added if bias is None else _by_distance(bias.double(), distance)
        new_ones = q[first : first + new]
        pieces.append(_attend(new_ones, keys, values, seen, scale, softcap, added=added, sinks=sinks))
    return torch.cat(pieces)


def encoder_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: ForwardContext,
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Queries [T, H, D] and keys and values [T, G, D] of texts; bias [H, 2 * reach + 1] -> [T, H, D]."""
    pieces: list[Tensor] = []
    texts = [tensor.split(step.query_lens_host) for tensor in (q, k, v)]
    for queries, keys, values in zip(*texts, strict=True):
        held = torch.arange(len(queries), device=q.device)
        distance = held[None, :] - held[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool) if window is None else distance.abs() <= window
        if causal:
            seen &= distance <= 0
        added = None
        if bias is not None:
            added = _by_distance(bias.to(q.dtype), distance)
        pieces.append(_attend(queries, keys, values, seen, scale, added=added))
    return torch.cat(pieces)


def _by_distance(bias: Tensor, distance: Tensor) -> Tensor:
    reach = bias.shape[1] // 2
    return bias[:, distance.clamp(-reach, reach) + reach]


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    *,
    added: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries [Q, H, D] of one text, its keys and values [K, G, D], and which are `seen` [Q, K]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if added is not None:
        scores = scores + added.double()
    masses = (scores.masked_fill(~seen, -math.inf)).exp()
    total = masses.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", masses / total, values)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    added = None if bias is None else bias.double()
    return F.layer_norm(x.double(), weight.shape, weight.double(), added, eps)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn pairs of the first numbers of heads [T, H, D] by angles, whose cosines lie before their sines."""
    wide, count = x.double(), cos_sin.shape[1] // 2
    turns = torch.complex(*cos_sin.double().split(count, dim=1))[:, None]
    turned = torch.complex(wide[..., :count], wide[..., count : 2 * count]) * turns
    return torch.cat([turned.real, turned.imag, wide[..., 2 * count :]], dim=-1)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu_squared": lambda x: x.relu() ** 2,
    "relu": torch.relu,
}


def activation(x: Tensor, kind: str) -> Tensor:
    """One of the functions between products."""
    return _ACTIVATIONS[kind](x.double())
