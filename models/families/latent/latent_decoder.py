"""The decoder with latent attention, and the fields of config.json that describe it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import msgspec

from models.config import ConfigError, Size, family_fields
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.layers.latent_attention import LatentSpec
from models.layers.rotary import Rope, read_rope, read_sharpening
from models.model import ModelSetup


class LatentFields(msgspec.Struct, frozen=True, kw_only=True):
    kv_lora_rank: Size
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size | None = None
    """The numbers of a head's value; None means an equal part of the hidden state for each head."""
    rope_interleave: bool | None = True
    """Whether rotation pairs neighbours, in families that come with both."""


class LatentForCausalLM(DecoderForCausalLM):
    """A family with latent attention, whose widths stand beside its other fields of config.json."""

    turns_neighbours: ClassVar[bool | None] = None
    """Whether rotation pairs neighbours, where the family has a rule; None means that config.json says it."""

    def spec(self, setup: ModelSetup) -> DecoderSpec:
        config = setup.config
        fields, widths = family_fields(config, self.fields), family_fields(config, LatentFields)
        width, turns_neighbours = widths.qk_rope_head_dim, self.turns_neighbours
        rope = self.rope(setup, fields, width)
        if 2 * len(rope.frequencies) != width:
            raise ConfigError(
                f"config.json of this {config.architecture} rotates {2 * len(rope.frequencies)} of {width} "
                "dimensions of a key ('partial_rotary_factor', 'qk_rope_head_dim'), and all of them must be"
            )
        latent = LatentSpec(
            query_rank=widths.q_lora_rank,
            rank=widths.kv_lora_rank,
            nope=widths.qk_nope_head_dim,
            rope=width,
            value=widths.v_head_dim or max(1, config.hidden_size // config.num_heads),
            bias=fields.attention_bias,
            turns_neighbours=bool(widths.rope_interleave) if turns_neighbours is None else turns_neighbours,
        )
        scale = config.head_dim**-0.5 * read_sharpening(config.raw)
        return replace(fields.spec(setup, rope), latent=latent, attention_scale=scale)

    def rope(self, setup: ModelSetup, fields: DecoderFields, width: int) -> Rope:
        """The rope of a key's part that is rotated, which is `width` wide."""
        return read_rope(setup.config.raw, width, setup.max_len)
