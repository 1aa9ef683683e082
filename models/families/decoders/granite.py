"""Granite 3: Llama with multipliers of embeddings, attention, residuals and logits."""

from __future__ import annotations

from models.config import ModelConfig, family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, DecoderSpec, LayerSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup


class GraniteFields(DecoderFields, frozen=True, kw_only=True):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def spec_with_factors(self, config: ModelConfig, layers: tuple[LayerSpec, ...]) -> DecoderSpec:
        return self.spec(
            config,
            layers,
            attention_scale=self.attention_multiplier,
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            embedding_scale=self.embedding_multiplier,
            residual_scale=self.residual_multiplier,
            logit_scale=1.0 / self.logits_scaling,
        )


class GraniteForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        rope = read_rope(config.raw, config.head_dim, setup.max_len)
        layers = (LayerSpec(rope=rope),) * config.num_layers
        super().__init__(setup, family_fields(config, GraniteFields).spec_with_factors(config, layers))
