"""Granite 3: Llama with multipliers of embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderSpec
from models.families.decoders.llama import LlamaFields
from models.layers.rotary import Rope
from models.model import ModelSetup


class GraniteFields(LlamaFields, frozen=True, kw_only=True):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(
            super().spec(setup, rope),
            attention_scale=self.attention_multiplier,
            embedding_scale=self.embedding_multiplier,
            residual_scale=self.residual_multiplier,
            logit_scale=1.0 / self.logits_scaling,
        )


class GraniteForCausalLM(DecoderForCausalLM):
    fields = GraniteFields
