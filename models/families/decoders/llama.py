"""Llama, Mistral, Ministral 3, and the many models that were published under their names."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from models.config import Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.layers.attention import QueryGrowth
from models.layers.rotary import Rope
from models.model import ModelSetup


class LlamaFields(DecoderFields, frozen=True, kw_only=True):
    mlp_bias: bool = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), mlp_bias=self.mlp_bias)


class LlamaForCausalLM(DecoderForCausalLM):
    fields = LlamaFields


class MistralFields(LlamaFields, frozen=True, kw_only=True):
    sliding_window: Size | None = 4096
    """The window of all layers; later checkpoints say null."""

    def window(self, index: int) -> int | None:
        return self.sliding_window


class MistralForCausalLM(DecoderForCausalLM):
    fields = MistralFields


class GrowthFields(msgspec.Struct, frozen=True):
    """The rope parameters that say how queries grow."""

    llama_4_scaling_beta: float = 0.0
    original_max_position_embeddings: Size | None = None

    def growth(self, longest: int) -> QueryGrowth | None:
        """How queries grow in texts of up to `longest` tokens; None if they do not."""
        length = self.original_max_position_embeddings
        if not self.llama_4_scaling_beta or length is None or longest <= length:
            return None
        return QueryGrowth(self.llama_4_scaling_beta, length)


class Ministral3Fields(MistralFields, frozen=True, kw_only=True):
    sliding_window: Size | None = None
    rope_parameters: GrowthFields

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), query_growth=self.rope_parameters.growth(setup.max_len))


class Ministral3ForCausalLM(DecoderForCausalLM):
    fields = Ministral3Fields
