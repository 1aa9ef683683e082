"""Llama, Mistral, Ministral 3, and the many models that were published under their names."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from models.config import Size, family_fields
from models.families.decoders.decoder import (
    DecoderFields,
    DecoderForCausalLM,
    DecoderSpec,
    LayerSpec,
)
from models.layers.attention import QueryGrowth
from models.layers.rotary import read_rope
from models.model import ModelSetup


class LlamaForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup, _spec(setup, family_fields(setup.config, DecoderFields), window=None))


class MistralFields(DecoderFields, frozen=True, kw_only=True):
    sliding_window: Size | None = 4096
    """The window of all layers; later checkpoints say null."""


class MistralForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        fields = family_fields(setup.config, MistralFields)
        super().__init__(setup, _spec(setup, fields, window=fields.sliding_window))


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


class Ministral3Fields(DecoderFields, frozen=True, kw_only=True):
    rope_parameters: GrowthFields


class Ministral3ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        fields = family_fields(setup.config, Ministral3Fields)
        growth = fields.rope_parameters.growth(setup.max_len)
        spec = _spec(setup, fields, window=fields.sliding_window)
        super().__init__(setup, replace(spec, query_growth=growth))


def _spec(setup: ModelSetup, fields: DecoderFields, window: int | None) -> DecoderSpec:
    config = setup.config
    rope = read_rope(config.raw, config.head_dim, setup.max_len)
    layers = (LayerSpec(rope=rope, window=window),) * config.num_layers
    return fields.spec(
        config,
        layers,
        qkv_bias=fields.attention_bias,
        o_bias=fields.attention_bias,
        mlp_bias=fields.mlp_bias,
    )
