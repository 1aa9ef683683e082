"""Gemma, Gemma 2 and Gemma 3 (text): norms of 1 + w, scaled embeddings, soft-caps, alternating windows."""

from __future__ import annotations

from typing import Any

from models.config import ModelConfig, Size, family_fields
from models.families.decoders.decoder import (
    PRE_NORMS,
    SANDWICH_NORMS,
    DecoderFields,
    DecoderForCausalLM,
    DecoderSpec,
    LayerSpec,
    Norms,
)
from models.layers.rotary import Rope, plain_rope, read_rope
from models.model import ModelSetup


class GemmaFields(DecoderFields, frozen=True, kw_only=True):
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None
    query_pre_attn_scalar: float | None = None
    """The number by whose root attention is scaled; None means the width of the heads."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    @property
    def activation(self) -> str:
        """The activation's name. The first checkpoints say "gelu" and mean its approximation."""
        named = self.hidden_activation or self.hidden_act
        return "gelu_pytorch_tanh" if named == "gelu" else named


class Gemma2Fields(GemmaFields, frozen=True, kw_only=True):
    query_pre_attn_scalar: float | None = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    sliding_window: Size | None = 4096
    sliding_window_pattern: int = 2
    """The number of layers of which one, the last, has no window."""

    def slides(self, index: int) -> bool:
        if self.layer_types is not None:
            return self.layer_types[index] == "sliding_attention"
        return (index + 1) % self.sliding_window_pattern != 0


class Gemma3Fields(Gemma2Fields, frozen=True, kw_only=True):
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window_pattern: int = 6
    rope_local_base_freq: float = 10000.0
    rope_parameters: dict[str, Any] | None = None


class GemmaForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        rope = read_rope(config.raw, config.head_dim, setup.max_len)
        layers = (LayerSpec(rope=rope),) * config.num_layers
        super().__init__(setup, _spec(config, family_fields(config, GemmaFields), layers, PRE_NORMS))


class Gemma2ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, Gemma2Fields)
        rope = read_rope(config.raw, config.head_dim, setup.max_len)
        layers = _layers(config, fields, far=rope, near=rope)
        super().__init__(setup, _spec(config, fields, layers, SANDWICH_NORMS))


class Gemma3ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, Gemma3Fields)
        far, near = _far_and_near(setup, fields)
        layers = _layers(config, fields, far=far, near=near)
        super().__init__(setup, _spec(config, fields, layers, SANDWICH_NORMS, per_head_norm=True))


def _far_and_near(setup: ModelSetup, fields: Gemma3Fields) -> tuple[Rope, Rope]:
    """The ropes of layers without a window and of layers with one, which are never stretched."""
    raw, dim = setup.config.raw, setup.config.head_dim
    far = read_rope(raw, dim, setup.max_len, layer_type="full_attention", default_theta=1000000.0)
    if fields.rope_parameters and "sliding_attention" in fields.rope_parameters:
        near = read_rope(raw, dim, setup.max_len, layer_type="sliding_attention")
    else:
        near = plain_rope(fields.rope_local_base_freq, dim)
    return far, near


def _layers(config: ModelConfig, fields: Gemma2Fields, far: Rope, near: Rope) -> tuple[LayerSpec, ...]:
    slide = LayerSpec(rope=near, window=fields.sliding_window)
    full = LayerSpec(rope=far)
    return tuple(slide if fields.slides(index) else full for index in range(config.num_layers))


def _spec(
    config: ModelConfig,
    fields: GemmaFields,
    layers: tuple[LayerSpec, ...],
    norms: Norms,
    per_head_norm: bool = False,
) -> DecoderSpec:
    return fields.spec(
        config,
        layers,
        activation=fields.activation,
        attention_scale=(fields.query_pre_attn_scalar or config.head_dim) ** -0.5,
        norms=norms,
        norm_offset=1.0,
        qk_norm="head" if per_head_norm else None,
        qkv_bias=fields.attention_bias,
        o_bias=fields.attention_bias,
        embedding_scale=config.hidden_size**0.5,
        attention_softcap=fields.attn_logit_softcapping,
        logit_softcap=fields.final_logit_softcapping,
    )
