"""Whisper: features of a recording pass two convolutions and an encoder, to which a decoder attends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, ModelConfig, Size, family_fields
from models.context import ForwardContext
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.decoders.decoder_spec import DecoderSpec, LayerSpec
from models.families.speech.encoder_decoder import (
    EPS,
    CrossLayer,
    EncoderDecoderFields,
    EncoderDecoderForCausalLM,
)
from models.layers.cross_attention import KeysWithoutBias, SourceInput, cross_layers
from models.layers.linear import frozen
from models.layers.mlp import MLP
from models.layers.norm import LayerNorm, enter
from models.model import ModelSetup
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span
from models.plain_files import read_object
from models.pooling.alignment import Alignment
from models.vision.blocks import WHOLE, Learned, TowerLayer, TowerLayers, TowerNames
from models.vision.tower import InLayers

_WINDOW = 3
"""The frames that a convolution reads for each row that it gives."""
_ENCODER_NAMES = TowerNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    mlp="",
)


class WhisperFields(EncoderDecoderFields, frozen=True, kw_only=True):
    num_mel_bins: Size = 80
    max_source_positions: Size = 1500
    median_filter_width: Annotated[int, msgspec.Meta(ge=1, le=99)] = 7


class Convolution(nn.Module):
    """Frames [L, inputs] -> [L / stride, size]: each row by the three frames around it; a gelu follows."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, inputs: int, size: int, stride: int) -> None:
        super().__init__()
        self.inputs, self.size, self.stride = inputs, size, stride

    def pull(self, weights: Weights) -> None:
        kernel = weights.take("weight", [self.size, self.inputs, _WINDOW])
        self.weight = frozen(ops.pack(kernel.flatten(1), plain=True))
        self.bias = frozen(weights.take("bias", [self.size]))

    def forward(self, items: Sequence[Tensor]) -> list[Tensor]:
        windows = [F.pad(each, (0, 0, 1, 1)).unfold(0, _WINDOW, self.stride).flatten(1) for each in items]
        rows = ops.linear(torch.cat(windows), self.weight, self.bias, kind="gelu")
        return list(rows.split([len(each) for each in windows]))


class WhisperEncoderLayer(TowerLayer):
    def __init__(self, size: int, fields: WhisperFields) -> None:
        mlp = MLP(
            *(size, fields.encoder_ffn_dim, WHOLE),
            activation=fields.hidden_act,
            names=("fc1", "fc2"),
            bias=True,
        )
        norms = LayerNorm(size, EPS), LayerNorm(size, EPS)
        super().__init__(size, fields.encoder_attention_heads, mlp, norms, _ENCODER_NAMES)
        whole = Span.whole(size)
        self.qkv = KeysWithoutBias(size, [whole] * 3, bias=True, sources=_ENCODER_NAMES.qkv)


class WhisperEncoder(nn.Module):
    """Features of recordings [bands, frames] -> rows [S, size], which every rank computes whole."""

    def __init__(self, size: int, fields: WhisperFields) -> None:
        super().__init__()
        self.conv1 = Convolution(fields.num_mel_bins, size, 1)
        self.conv2 = Convolution(size, size, 2)
        self.embed_positions = Learned(fields.max_source_positions, size, name="weight")
        self.layers = TowerLayers(fields.encoder_layers, lambda: WhisperEncoderLayer(size, fields))
        self.layer_norm = LayerNorm(size, EPS)

    def forward(self, features: Sequence[Tensor], step: ForwardContext) -> InLayers[Tensor]:
        rows = self.conv2(self.conv1([each.t() for each in features]))
        stream = torch.cat([each + self.embed_positions.weight for each in rows])
        delta, stream = yield from self.layers(step, stream)
        return enter(self.layer_norm, delta, stream)[0]


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
        self.encoder = WhisperEncoder(setup.config.hidden_size, own)
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
    try:
        named = msgspec.convert(read_object(path), _GenerationFields).alignment_heads if path.exists() else []
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    layers = range(config.num_layers // 2, config.num_layers)
    return named or [(layer, head) for layer in layers for head in range(config.num_heads)]
