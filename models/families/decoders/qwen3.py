"""Qwen3: Qwen2 with normalised query and key heads instead of biases."""

from __future__ import annotations

from models.config import family_fields
from models.families.decoders.decoder import DecoderForCausalLM, LayerSpec
from models.families.decoders.qwen2 import QwenFields
from models.layers.rotary import read_rope
from models.model import ModelSetup


class Qwen3ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, QwenFields)
        rope = read_rope(config.raw, config.head_dim, setup.max_len)
        layers = tuple(LayerSpec(rope=rope, window=window) for window in fields.windows(config))
        spec = fields.spec(
            config,
            layers,
            qk_norm="head",
            qkv_bias=fields.attention_bias,
            o_bias=fields.attention_bias,
        )
        super().__init__(setup, spec)
