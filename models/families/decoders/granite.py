"""Granite 3: Llama with multipliers of embeddings, attention, residuals and logits."""

from __future__ import annotations

from models.config import family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, LayerSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup


class GraniteFields(DecoderFields, frozen=True, kw_only=True):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class GraniteForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, GraniteFields)
        rope = read_rope(config.raw, config.head_dim, setup.max_len)
        layers = (LayerSpec(rope=rope),) * config.num_layers
        spec = fields.spec(
            config,
            layers,
            attention_scale=fields.attention_multiplier,
            qkv_bias=fields.attention_bias,
            o_bias=fields.attention_bias,
            mlp_bias=fields.mlp_bias,
            embedding_scale=fields.embedding_multiplier,
            residual_scale=fields.residual_multiplier,
            logit_scale=1.0 / fields.logits_scaling,
        )
        super().__init__(setup, spec)
