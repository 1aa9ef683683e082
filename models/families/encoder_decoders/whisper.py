"""Whisper: features of a recording pass two convolutions and an encoder, to which a decoder attends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import msgspec
from torch import Tensor

from models.checkpoint.weights import Weights, load
from models.config import ModelConfig, Size, family_fields
from models.context import ForwardContext
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.decoders.decoder_spec import DecoderSpec, LayerSpec
from models.families.encoder_decoders.encoder_decoder import (
    CrossLayer,
    EncoderDecoderFields,
    EncoderDecoderForCausalLM,
)
from models.layers.cross_attention import KeysWithoutBias, SourceInput, cross_layers
from models.model import ModelSetup
from models.parallel.parallel import Parallel
from models.plain_files import read_object, typed
from models.pooling.alignment import Alignment
from models.towers.audio import AudioFields, WhisperEncoder
from models.towers.tower import InLayers, read_tower_fields

_USUAL = {"num_mel_bins": 80}


class WhisperFields(EncoderDecoderFields, frozen=True, kw_only=True):
    num_mel_bins: Size = 80
    max_source_positions: Size = 1500
    median_filter_width: Annotated[int, msgspec.Meta(ge=1, le=99)] = 7


class WhisperDecoderLayer(CrossLayer):
    def __init__(self, config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel) -> None:
        super().__init__(config, spec, layer, parallel)
        attention = cast("DecoderAttention", self.self_attn)
        projected = attention.qkv_proj
        attention.qkv_proj = KeysWithoutBias(
            projected.inputs, projected.outputs, bias=True, sources=projected.sources
        )


class WhisperForConditionalGeneration(EncoderDecoderForCausalLM):
    fields = WhisperFields
    layer_class = WhisperDecoderLayer
    source_kind = "audio"

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        own = family_fields(setup.config, WhisperFields)
        self.source_len = own.max_source_positions
        self.source_shape = own.num_mel_bins, 2 * own.max_source_positions
        self.encoder = WhisperEncoder(read_tower_fields(setup.config.raw, AudioFields, _USUAL))
        heads = _alignment_heads(setup.folder, setup.config)
        layers = cross_layers(self.modules())
        self.alignment = Alignment(heads, layers, setup.parallel, own.median_filter_width)

    def pull(self, weights: Weights) -> None:
        weights.ignore("proj_out")  # the head is tied
        super().pull(weights)
        load(self.encoder, weights / "model.encoder")

    def encoded(self, sources: Sequence[SourceInput], step: ForwardContext) -> InLayers[Tensor]:
        return self.encoder([each.features for each in sources if each.features is not None], step)


class _GenerationFields(msgspec.Struct):
    alignment_heads: list[tuple[int, int]] = []


def _alignment_heads(folder: Path, config: ModelConfig) -> list[tuple[int, int]]:
    """The heads that follow what is said: those that are named, or else all of the latter half of layers."""
    path = folder / "generation_config.json"
    named = typed(read_object(path), _GenerationFields, str(path)).alignment_heads if path.exists() else []
    layers = range(config.num_layers // 2, config.num_layers)
    return named or [(layer, head) for layer in layers for head in range(config.num_heads)]
