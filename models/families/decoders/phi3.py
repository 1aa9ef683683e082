"""Phi-3, Phi-3.5, Phi-4: Llama with fused matrices in the checkpoint, longrope, and heads rotated in part."""

from __future__ import annotations

from models.config import family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, LayerSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup


class Phi3ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, DecoderFields)
        layer = LayerSpec(
            rope=read_rope(config.raw, config.head_dim, setup.max_len), window=fields.sliding_window
        )
        super().__init__(setup, fields.spec(config, (layer,) * config.num_layers, fused=True))
