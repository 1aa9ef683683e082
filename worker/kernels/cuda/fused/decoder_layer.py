"""A dense decoder layer of one to eight rows in five kernels: `fused_layer`.

1. norm, queries, keys and values with their biases, norms of heads, rotation, and the cache;
2. attention, whose last programs join the splits of keys;
3. the output projection and the residual sum;
4. norm, gates and ups with their activation;
5. downs and the residual sum.

It is chosen by what a layer is: any family whose layers are plain `DecoderLayer`s with RMS norms before both
sublayers. Its operations compute all others, and steps of more rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models import ops
from models.context import context
from models.families.decoders.decoder import DecoderLayer
from models.families.decoders.decoder_attention import DecoderAttention
from models.layers.attention import Attention
from models.layers.linear import Linear
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.ops.attention_inputs import CACHE_DTYPES, UNSCALED, HeadPrep
from worker.kernels.cuda.attention import DTYPES, knows
from worker.kernels.cuda.capabilities import COUNTERS, JOINED_ROWS, joined_tiles
from worker.kernels.cuda.launch import joined
from worker.kernels.cuda.linear import GATES
from worker.kernels.cuda.products.packing import Mixed, Packed


def fused_layer(layer: Any, delta: Tensor | None, stream: Tensor, cos_sin: Tensor | None) -> Tensor | None:
    if joined() is None or not (0 < len(stream) <= JOINED_ROWS and _fits(layer, stream)):
        return None
    stream = stream if delta is None else ops.add(stream, delta)
    mlp, attention = layer.mlp, layer.self_attn
    heads = attention.attention
    kv, step, scales = heads.bound(), context(heads.group), heads.cache_scales or UNSCALED
    prep = HeadPrep(cos_sin)
    if attention.qk_norm is not None:
        prep = HeadPrep(cos_sin, attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)
    norm, projection = layer.before_attention, attention.qkv_proj
    q = ops.project_heads(
        *(stream, norm.weight, norm.eps, projection.weight, kv, step), projection.bias, prep, scales
    )
    out = heads.attend(q, kv, step, heads.cache_scales, heads.window)
    stream = ops.add_product(out, attention.o_proj.weight, stream, attention.o_proj.bias)
    norm, gates = layer.before_mlp, mlp.gate_up_proj
    inner = ops.project_gates(stream, norm.weight, norm.eps, gates.weight, gates.kind, gates.bias)
    return ops.add_product(inner, mlp.down_proj.weight, stream, mlp.down_proj.bias)


def _fits(layer: Any, stream: Tensor) -> bool:
    """Whether a layer is plain enough, and its matrices and heads are such as the kernels know."""
    if type(layer) is not DecoderLayer or layer.has_state or layer.is_parallel or layer.norms_sums:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not DecoderAttention or type(mlp) is not GatedMLP:
        return False
    heads = attention.attention
    return (
        layer.residual_scale == 1.0
        and (layer.after_attention, layer.after_mlp) == (None, None)
        and all(type(norm) is RMSNorm for norm in (layer.before_attention, layer.before_mlp))
        and (attention.limit, attention.query_growth) == (None, None)
        and not attention.gate_width
        and attention.head_gates is None
        and attention.qk_norm in (None, "head")
        and type(heads) is Attention
        and knows(heads)
        and heads.bound().dtype in (stream.dtype, *CACHE_DTYPES.values())
        and mlp.gate_up_proj.kind in GATES
        and attention.o_proj.parallel.size == 1
        and stream.dtype in DTYPES
        and stream.is_contiguous()
        and all(
            _is_plain(linear, stream.dtype)
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        )
    )


def _is_plain(linear: Linear, dtype: torch.dtype) -> bool:
    """Whether a product is one with a plain matrix, to which no adapter adds."""
    weight = linear.weight
    adapted = linear.adapters is not None and context().adapters is not None
    return (
        not (adapted or isinstance(weight, Packed | Mixed))
        and weight.dtype == dtype
        and weight.is_contiguous()
        and len(weight) // joined_tiles(dtype).outputs < COUNTERS
    )
