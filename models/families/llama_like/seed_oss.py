"""Seed-OSS: Llama with biased queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderSpec
from models.families.decoders.llama import LlamaFields
from models.layers.rotary import Rope
from models.model import ModelSetup


class SeedOssFields(LlamaFields, frozen=True, kw_only=True):
    attention_bias: bool = True
    attention_out_bias: bool = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), o_bias=self.attention_out_bias)


class SeedOssForCausalLM(DecoderForCausalLM):
    fields = SeedOssFields
