"""Operations of decoder layers that belong together, for devices that compute them in one kernel.

`fused_layer` is the only one that a layer calls. A device that has it calls the others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from models.context import ForwardContext
from models.ops.attention_inputs import AS_PROJECTED, UNSCALED, CacheScales, HeadPrep
from models.ops.reference import add, gated_linear, linear, rms_norm, rotary_and_cache


def fused_layer(layer: Any, delta: Tensor | None, stream: Tensor, cos_sin: Tensor | None) -> Tensor | None:
    """The residual stream [T, hidden_size] behind a `DecoderLayer`; None: its operations are to be called.

    What it gets is what the layer does: the stream, what is still to be added to it, and the angles.
    """
    return None


def project_heads(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    kv: Tensor,
    step: ForwardContext,
    bias: Tensor | None = None,
    prep: HeadPrep = AS_PROJECTED,
    scales: CacheScales = UNSCALED,
) -> Tensor:
    """The norm of x [T, inputs], its product, `rotary_and_cache` -> prepared queries [T, heads, D].

    The outputs of the product are the heads of queries, then those of keys and values, which `kv` has.
    """
    keys, dim = kv.shape[2], kv.shape[-1]
    heads = linear(rms_norm(x, norm, eps), weight, bias).unflatten(1, (-1, dim))
    q, k, v = heads.split([heads.shape[1] - 2 * keys, keys, keys], dim=1)
    return rotary_and_cache(q, k, v, kv, step, prep, scales)


def project_gates(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, kind: str, bias: Tensor | None = None
) -> Tensor:
    """The norm of x [T, inputs] and its `gated_linear` [T, outputs]."""
    return gated_linear(rms_norm(x, norm, eps), weight, bias, kind)


def add_product(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of x [T, inputs] and the sum with a residual [T, outputs]."""
    return add(residual, linear(x, weight, bias))
