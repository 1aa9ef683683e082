"""OLMo, the first: Llama with layer norms that have no weights."""

from __future__ import annotations

from dataclasses import replace

from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.layers.rotary import Rope
from models.model import ModelSetup


class OlmoFields(DecoderFields, frozen=True, kw_only=True):
    clip_qkv: float | None = None

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), qkv_limit=self.clip_qkv)


class OlmoForCausalLM(DecoderForCausalLM):
    fields = OlmoFields
    fixed = {"norm": "layer without weight", "eps": 1e-5}
