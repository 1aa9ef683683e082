"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with matrices stored as [out, in], and one key head for all."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from models.families.classics.gpt2 import GPT2Fields, GPT2LMHeadModel
from models.families.decoders.decoder_spec import DecoderSpec
from models.layers.rotary import Rope
from models.model import ModelSetup


class GPTBigCodeFields(GPT2Fields, frozen=True, kw_only=True):
    hidden_act: str = msgspec.field(name="activation_function", default="gelu_pytorch_tanh")
    multi_query: bool = True
    """Whether all query heads share a key head; else q, k and v lie together head by head."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), qkv="in one" if self.multi_query else "by head")


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    fields = GPTBigCodeFields
    fixed = {
        name: value for name, value in GPT2LMHeadModel.fixed.items() if name not in ("qkv", "transposed")
    }
