"""LFM2 and LFM3: short convolutions in most layers and attention in the others, with MLPs or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import msgspec

from models.config import ConfigError, Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec, Norms
from models.families.hybrids.layer_kinds import FULL, check_kinds, layers_of
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec
from models.layers.rotary import Rope, read_rope
from models.layers.short_conv import ShortConvSpec
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing

_CONVOLUTION, _SLIDING = "conv", "sliding_attention"
_LFM2_NORMS = Norms(before_attention="operator_norm", before_mlp="ffn_norm")
_LFM3_NORMS = Norms("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
_LFM3_ROPES: Mapping[str, object] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
"""What layers with attention have where config.json says nothing."""


class Lfm2Fields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 1000000.0

    rms_norm_eps: Eps = msgspec.field(name="norm_eps", default=1e-5)
    conv_L_cache: Size = 3
    conv_bias: bool = False
    full_attn_idxs: tuple[int, ...] | None = None
    """The layers with attention, in files that have no `layer_types`; None: all."""
    intermediate_size: Size = 12288
    block_ff_dim: Size | None = None
    """The name of `intermediate_size` in published files, which comes first."""
    block_auto_adjust_ff_dim: bool = True
    """Whether MLPs have two thirds of that, times a factor, in whole blocks."""
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: Size = 256

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), intermediate_size=self.mlp_features())

    def mlp_features(self) -> int:
        """The inner features of MLPs."""
        features = self.block_ff_dim or self.intermediate_size
        if self.block_auto_adjust_ff_dim:
            features = 2 * features // 3
            if self.block_ffn_dim_multiplier is not None:
                blocks = -(-int(self.block_ffn_dim_multiplier * features) // self.block_multiple_of)
                features = blocks * self.block_multiple_of
        if features < 1:
            raise ConfigError("'intermediate_size' is too small: MLPs would have no features")
        return features

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        convolution = ShortConvSpec(taps=self.conv_L_cache, bias=self.conv_bias)
        return layers_of(self, self.kinds(setup.config.num_layers), rope, convolution)

    def kinds(self, count: int) -> tuple[str, ...]:
        """The kinds of so many layers."""
        if self.layer_types is None:
            attending = range(count) if self.full_attn_idxs is None else self.full_attn_idxs
            return tuple(FULL if index in attending else _CONVOLUTION for index in range(count))
        return check_kinds(self.layer_types, count, (_CONVOLUTION, FULL), "layer_types")


class Lfm2MoeFields(Lfm2Fields, frozen=True, kw_only=True):
    block_auto_adjust_ff_dim: bool = False
    num_dense_layers: int = 2
    """The number of first layers that have an MLP instead of experts."""
    num_experts: Size = 32
    num_experts_per_tok: Size = 4
    moe_intermediate_size: Size = 1792
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def experts(self, index: int) -> ExpertSpec | None:
        if index < self.num_dense_layers:
            return None
        return ExpertSpec(
            routing=Routing(
                experts=self.num_experts,
                chosen=self.num_experts_per_tok,
                scores="sigmoid",
                normalised=self.norm_topk_prob,
                epsilon=1e-6,
                factor=self.routed_scaling_factor,
            ),
            width=self.moe_intermediate_size,
            activation=self.hidden_act,
            scope="feed_forward",
            correction="expert_bias" if self.use_expert_bias else "",
            saved=SavedExperts(gate="w1", up="w3", down="w2"),
        )


class Lfm3Fields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = msgspec.field(name="norm_eps", default=1e-5)
    conv_L_cache: Size = 7
    conv_bias: bool = False
    intermediate_size: Size = 7680
    sliding_window: Size | None = 256
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        norms = _LFM3_NORMS if self.use_sandwich_norm else _LFM2_NORMS
        return replace(super().spec(setup, rope), norms=norms, head_gates=self.use_attention_gate)

    def rope(self, setup: ModelSetup) -> Rope:
        """The rope of layers without a window."""
        return _lfm3_rope(setup, FULL)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        convolution = LayerSpec(rope=None, state=ShortConvSpec(taps=self.conv_L_cache, bias=self.conv_bias))
        near = LayerSpec(rope=_lfm3_rope(setup, _SLIDING), window=self.sliding_window)
        made = {_CONVOLUTION: convolution, _SLIDING: near, FULL: LayerSpec(rope=rope)}
        return tuple(made[kind] for kind in self.kinds(setup.config.num_layers))

    def kinds(self, count: int) -> tuple[str, ...]:
        """The kinds of so many layers."""
        kinds = self.layer_types
        if kinds is None:
            turns = (_SLIDING, _CONVOLUTION, FULL, _CONVOLUTION)
            kinds = tuple(turns[index % 4] if index else _CONVOLUTION for index in range(count))
        return check_kinds(kinds, count, (_CONVOLUTION, FULL, _SLIDING), "layer_types")


def _lfm3_rope(setup: ModelSetup, kind: str) -> Rope:
    raw = setup.config.raw
    raw = {**raw, "rope_parameters": raw.get("rope_parameters") or _LFM3_ROPES}
    return read_rope(raw, setup.config.head_dim, setup.max_len, layer_type=kind)


class Lfm2ForCausalLM(DecoderForCausalLM):
    fields = Lfm2Fields
    fixed = {
        "norms": _LFM2_NORMS,
        "qk_norm": "head",
        "activation": "silu",
        "qkv_bias": False,
        "o_bias": False,
    }
    saved_names = {
        "state": "conv",
        "mlp": "feed_forward",
        "norm": "embedding_norm",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    }


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    fields = Lfm2MoeFields


class Lfm3ForCausalLM(DecoderForCausalLM):
    """LFM3: also layers whose attention has a window, gates of heads, and norms behind sublayers."""

    fields = Lfm3Fields
    fixed = {"qk_norm": "head", "activation": "silu"}
    saved_names = {
        "state": "conv",
        "mlp": "feed_forward",
        "norm": "embedding_norm",
        "head_gates": "gate_proj",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    }
