"""Attention of the decoder that families share, with its projections and the norms of its heads."""

from __future__ import annotations

import msgspec
from torch import Tensor, nn

from models import ops
from models.config import ModelConfig
from models.conversion.conversion_choice import looks_ahead
from models.families.decoders.decoder_spec import DecoderSpec, LayerSpec
from models.layers.attention import Attention, EncoderAttention
from models.layers.linear import Interleaved, Linear, Pairs, RowLinear
from models.layers.norm import HeadLayerNorm, RMSNorm, SpreadRMSNorm
from models.ops.attention_inputs import HeadPrep
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span


class DecoderAttention(nn.Module):
    ignored = ("rotary_emb.inv_freq", "bias", "masked_bias")
    """The rope frequencies, which checkpoints of 2023 carry, and the causal mask, which older ones do."""

    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        layer: LayerSpec,
        parallel: Parallel,
        width: int | None = None,
    ) -> None:
        """`width`: that of what is projected to queries, keys and values, if it is not the hidden size."""
        super().__init__()
        heads = parallel.share_heads(config.num_heads)
        kv_heads = parallel.share_kv_heads(config.num_kv_heads)
        q, kv = heads.times(config.head_dim), kv_heads.times(config.head_dim)
        self.widths = [q.length * (2 if spec.output_gate else 1), kv.length, kv.length]
        self.qkv_proj = _projections(config, spec, layer, heads, kv_heads, width)
        self.limit = spec.qkv_limit
        self.head_dim = config.head_dim
        self.gate_width = q.length if spec.output_gate else 0
        self.head_gates = Linear(width or config.hidden_size, heads) if spec.head_gates else None
        self.o_proj = RowLinear(q, config.hidden_size, parallel, bias=spec.o_bias, transposed=spec.transposed)
        if looks_ahead(config):
            self.attention = _look_around(config, spec, layer)
        else:
            self.attention = Attention(
                heads=heads.length,
                kv_heads=kv_heads.length,
                head_dim=config.head_dim,
                scale=_scale(spec, layer),
                window=layer.window,
                softcap=spec.attention_softcap,
                sinks=heads if spec.sinks else None,
                slopes=spec.slopes and spec.slopes[heads.start : heads.stop],
                biased=spec.biased,
            )
        self.query_growth = spec.query_growth
        self.qk_norm = spec.qk_norm
        if spec.qk_norm in ("head", "rotated head"):
            self.q_norm = RMSNorm(config.head_dim, spec.eps, offset=spec.norm_offset)
            self.k_norm = RMSNorm(config.head_dim, spec.eps, offset=spec.norm_offset)
        elif spec.qk_norm == "projection":
            self.q_norm = SpreadRMSNorm(q, spec.eps, parallel)
            self.k_norm = SpreadRMSNorm(kv, spec.eps, parallel)
        elif spec.qk_norm == "layer norm":
            pairs = _pairs(config, spec, layer)
            self.q_norm = HeadLayerNorm(heads, config.head_dim, spec.eps, pairs)
            self.k_norm = HeadLayerNorm(kv_heads, config.head_dim, spec.eps, pairs)

    def forward(self, x: Tensor, cos_sin: Tensor | None) -> Tensor:
        projected = self.qkv_proj(x)
        if self.limit is not None:
            projected = projected.clamp(-self.limit, self.limit)
        q, k, v = projected.split(self.widths, dim=-1)
        gate = None
        if self.gate_width:
            q, gate = q.split(self.gate_width, dim=-1)
        prep = HeadPrep(cos_sin)
        if self.qk_norm in ("head", "rotated head"):
            prep = HeadPrep(cos_sin, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        elif self.qk_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.qk_norm == "rotated head" and cos_sin is not None:
            q, k = (ops.rotate(x.view(len(x), -1, self.head_dim), cos_sin) for x in (q, k))
            prep = msgspec.structs.replace(prep, cos_sin=None)
        if (growth := self.query_growth) is not None:
            q = growth.of(q)
        out = self.attention(q, k, v, prep)
        if self.head_gates is not None:
            gate = self.head_gates(x)
        return self.o_proj(out if gate is None else ops.gate(out, gate, "sigmoid"))


def _projections(
    config: ModelConfig,
    spec: DecoderSpec,
    layer: LayerSpec,
    heads: Span,
    kv_heads: Span,
    width: int | None = None,
) -> Linear:
    """The projections of a layer's input to queries, with their gates, to keys and to values."""
    size, dim = width or config.hidden_size, config.head_dim
    if spec.qkv == "by head":
        shared = heads.size // kv_heads.size
        if heads.length != shared * kv_heads.length:
            raise ValueError(
                f"--tensor-parallel-size: each key head of {config.architecture} is stored together with its "
                f"queries, so there can be no more ranks than the {kv_heads.size} key heads"
            )
        rows, each = kv_heads.times((shared + 2) * dim), Interleaved((shared * dim, dim, dim))
        return Linear(size, [rows], bias=spec.qkv_bias, sources=("qkv_proj",), orders=(each,))
    pairs = _pairs(config, spec, layer)
    q, kv = heads.times(2 * dim if spec.output_gate else dim), kv_heads.times(dim)
    order_of_q = Interleaved((dim, dim)) if spec.output_gate else pairs
    return Linear(
        size,
        [q, kv, kv],
        bias=spec.qkv_bias,
        sources=("q_proj", "k_proj", "v_proj") if spec.qkv == "apart" else (),
        orders=(order_of_q, pairs, None),
        transposed=spec.transposed,
    )


def _pairs(config: ModelConfig, spec: DecoderSpec, layer: LayerSpec) -> Pairs | None:
    """The order of a head's dimensions, if its rotation pairs neighbours."""
    if not spec.turns_neighbours or layer.rope is None:
        return None
    return Pairs(config.head_dim, 2 * len(layer.rope.frequencies), leading=True)


def _scale(spec: DecoderSpec, layer: LayerSpec) -> float:
    return spec.attention_scale if layer.attention_scale is None else layer.attention_scale


def _look_around(config: ModelConfig, spec: DecoderSpec, layer: LayerSpec) -> EncoderAttention:
    """Attention for a decoder that sees its whole text. Half of a window lies on each side of a token."""
    if spec.attention_softcap is not None or spec.sinks or spec.slopes:
        what = "have sinks" if spec.sinks else "have alibi" if spec.slopes else "cap its attention"
        raise ValueError(f"{config.architecture} that attends in both directions cannot {what}")
    window = None if layer.window is None else layer.window // 2
    return EncoderAttention(head_dim=config.head_dim, scale=_scale(spec, layer), window=window)
