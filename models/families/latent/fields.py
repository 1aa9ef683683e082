"""The fields of config.json that describe latent attention, and the decoder that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from models.config import ConfigError, ModelConfig, Size, family_fields
from models.families.decoders.decoder import DecoderFields, DecoderSpec, LayerSpec
from models.layers.latent_attention import LatentSpec
from models.layers.moe import ExpertSpec
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


def latent_spec(
    setup: ModelSetup,
    fields: DecoderFields,
    experts: Callable[[int], ExpertSpec | None],
    *,
    turns_neighbours: bool | None = None,
    part_of: int | None = None,
    **others: Any,
) -> DecoderSpec:
    """The decoder of a family's fields; `experts` gives the mixture of the layer with a number, or None.

    `turns_neighbours` is a rule of the family; None means that config.json says it. `part_of` is the width
    that 'partial_rotary_factor' counts of; None means 'qk_rope_head_dim'. `others` go to the spec.
    """
    config = setup.config
    widths = family_fields(config, LatentFields)
    rope = _rope(config, widths.qk_rope_head_dim, part_of or widths.qk_rope_head_dim, setup.max_len)
    layers = tuple(LayerSpec(rope=rope, experts=experts(index)) for index in range(config.num_layers))
    latent = LatentSpec(
        query_rank=widths.q_lora_rank,
        rank=widths.kv_lora_rank,
        nope=widths.qk_nope_head_dim,
        rope=widths.qk_rope_head_dim,
        value=widths.v_head_dim or max(1, config.hidden_size // config.num_heads),
        bias=fields.attention_bias,
        turns_neighbours=bool(widths.rope_interleave) if turns_neighbours is None else turns_neighbours,
    )
    scale = config.head_dim**-0.5 * read_sharpening(config.raw)
    return fields.spec(config, layers, latent=latent, attention_scale=scale, **others)


def no_experts(index: int) -> None:
    """Give the layer `index` an MLP."""


def _rope(config: ModelConfig, width: int, part_of: int, max_len: int) -> Rope:
    rope = read_rope(config.raw, part_of, max_len)
    if 2 * len(rope.frequencies) != width:
        raise ConfigError(
            f"config.json of this {config.architecture} rotates {2 * len(rope.frequencies)} of {width} "
            "dimensions of a key ('partial_rotary_factor', 'qk_rope_head_dim'), and all of them must be"
        )
    return rope
