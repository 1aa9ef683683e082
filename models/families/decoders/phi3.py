"""Phi-3, Phi-3.5, Phi-4: Llama with fused matrices in the checkpoint, longrope, heads turned in part."""

from __future__ import annotations

from models.config import family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, DecoderSpec, LayerSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup


class Phi3ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, DecoderFields)
        layer = LayerSpec(
            rope=read_rope(config.raw, config.head_dim, setup.max_len), window=fields.sliding_window
        )
        spec = DecoderSpec(
            layers=(layer,) * config.num_layers,
            intermediate_size=fields.intermediate_size,
            activation=fields.hidden_act,
            eps=fields.rms_norm_eps,
            attention_scale=config.head_dim**-0.5,
            fused=True,
        )
        super().__init__(setup, spec)
