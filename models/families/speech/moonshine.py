"""Moonshine: samples of a recording pass three convolutions and an encoder, to which a decoder attends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, ModelConfig, Size, family_fields
from models.context import ForwardContext, use_context
from models.families.decoders.decoder import Decoder, DecoderLayer
from models.families.decoders.decoder_spec import PRE_NORMS, DecoderFields, DecoderSpec, LayerSpec, Norms
from models.families.speech.encoder_decoder import EPS, CrossLayer, EncoderDecoderForCausalLM
from models.layers.attention import Attention, EncoderAttention
from models.layers.cross_attention import SourceInput, filled_up, whole_width
from models.layers.linear import frozen
from models.layers.mlp import GatedMLP
from models.layers.rotary import Rope
from models.media.moonshine import CONVOLUTIONS, MOST_SAMPLES, positions_of, samples_of
from models.model import ModelSetup
from models.ops.attention_inputs import HeadPrep
from models.parallel.parallel import Parallel
from models.vision.tower import InLayers

_ROWS = 512
"""The rows that a convolution computes at a time."""
_NORMS: dict[str, Any] = {"norm": "layer", "norm_bias": False}
_ENCODER_NAMES = {"up_proj": "fc1", "down_proj": "fc2", "norm": "layer_norm"}


class MoonshineFields(DecoderFields, frozen=True, kw_only=True):
    default_part = 0.9

    hidden_act: str = msgspec.field(name="decoder_hidden_act", default="silu")
    encoder_hidden_act: str = "gelu"
    encoder_num_hidden_layers: Size
    encoder_num_attention_heads: Size
    encoder_num_key_value_heads: Size | None = None

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        config = setup.config
        heads = {config.num_heads, config.num_kv_heads, self.encoder_num_attention_heads}
        if len(heads | {self.encoder_num_key_value_heads or config.num_heads}) > 1:
            raise ConfigError(
                "config.json of this Moonshine: encoder and decoder must have as many heads of keys and "
                "values as of queries, and both the same number"
            )
        ahead = config.raw.get("is_causal") is False
        return replace(
            super().spec(setup, rope),
            activation=self.encoder_hidden_act if ahead else self.hidden_act,
            eps=EPS,
            norms=PRE_NORMS if ahead else Norms("input_layernorm", "", "final_layernorm"),
            o_bias=False,
            mlp_bias=True,
            is_gated=not ahead,
            turns_neighbours=True,
        )


class Strided(nn.Module):
    """Rows [L, inputs] -> [count, size]: each by `width` of them, which begin `stride` after those before."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, inputs: int, size: int, width: int, stride: int, *, bias: bool, kind: str | None
    ) -> None:
        """`kind`: the activation that follows."""
        super().__init__()
        self.inputs, self.size, self.width, self.stride = inputs, size, width, stride
        self.has_bias, self.kind = bias, kind

    def pull(self, weights: Weights) -> None:
        kernel = weights.take("weight", [self.size, self.inputs, self.width])
        self.weight = frozen(ops.pack(kernel.flatten(1), plain=True))
        self.bias = frozen(weights.take("bias", [self.size])) if self.has_bias else None

    def forward(self, rows: Tensor) -> Tensor:
        windows = rows.unfold(0, self.width, self.stride).split(_ROWS)  # copied piece by piece
        some = [ops.linear(each.flatten(1), self.weight, self.bias, kind=self.kind) for each in windows]
        return torch.cat(some)


class SampleNorm(nn.Module):
    """Normalises all numbers of a recording together, and scales each channel by its own factor."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def pull(self, weights: Weights) -> None:
        self.weight, self.bias = (frozen(weights.take(name, [self.size])) for name in ("weight", "bias"))

    def forward(self, rows: Tensor) -> Tensor:
        return F.group_norm(rows.t().unsqueeze(0), 1, self.weight, self.bias, EPS)[0].t()


class FilledHeads(nn.Module):
    """Attention whose heads are computed with zeros behind them, in a width that kernels take."""

    def __init__(self, attention: Attention | EncoderAttention) -> None:
        super().__init__()
        self.inner, self.dim = attention, attention.head_dim
        self.width = attention.head_dim = whole_width(self.dim)

    def pull(self, weights: Weights) -> None:
        load(self.inner, weights)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, prep: HeadPrep) -> Tensor:
        q, k, v = (filled_up(x.view(len(x), -1, self.dim), self.width).flatten(1) for x in (q, k, v))
        return self.inner(q, k, v, prep).view(len(q), -1, self.width)[..., : self.dim].flatten(1)


def fill_heads(layer: DecoderLayer) -> None:
    attention: Any = layer.self_attn
    attention.attention = FilledHeads(attention.attention)


class EncoderLayer(DecoderLayer):
    def __init__(self, config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel) -> None:
        super().__init__(config, spec, layer, parallel)
        fill_heads(self)


class MoonshineEncoder(Decoder):
    """Samples of recordings -> rows [S, size]: the layers are those of a decoder in which all see all."""

    def __init__(self, setup: ModelSetup, own: MoonshineFields) -> None:
        size, raw = setup.config.hidden_size, {**setup.config.raw, "is_causal": False}
        config = msgspec.structs.replace(setup.config, num_layers=own.encoder_num_hidden_layers, raw=raw)
        spec = own.spec(replace(setup, config=config), own.rope(setup))
        super().__init__(config, replace(spec, **_NORMS), setup.parallel, EncoderLayer)
        first, second, third = CONVOLUTIONS
        self.conv1 = Strided(1, size, *first, bias=False, kind=None)
        self.groupnorm = SampleNorm(size)
        self.conv2 = Strided(size, 2 * size, *second, bias=True, kind="gelu")
        self.conv3 = Strided(2 * size, size, *third, bias=True, kind="gelu")

    def convolved(self, samples: Tensor, length: int) -> Tensor:
        """The rows [length, size] of a recording [N], behind which there may be silence."""
        padded = F.pad(samples, (0, max(0, samples_of(length) - len(samples))))
        rows = self.groupnorm(torch.tanh(self.conv1(padded.unsqueeze(1))))
        return self.conv3(self.conv2(rows))[:length]


class MoonshineLayer(CrossLayer):
    cross_names = ("post_attention_layernorm", "o_proj")

    def __init__(self, config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel) -> None:
        super().__init__(config, spec, layer, parallel)
        fill_heads(self)
        self.mlp = GatedMLP(
            config.hidden_size,
            spec.intermediate_size,
            parallel,
            activation=spec.activation,
            bias=True,
            names=("fc1", "fc2"),
            up_first=True,
        )


class MoonshineForConditionalGeneration(EncoderDecoderForCausalLM):
    fields = MoonshineFields
    fixed = _NORMS
    layer_class = MoonshineLayer
    trunks = ("model.decoder",)
    saved_names = {}
    source_kind = "samples"
    source_shape = (1, MOST_SAMPLES)
    source_len = positions_of(MOST_SAMPLES)

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        self.encoder = MoonshineEncoder(setup, family_fields(setup.config, MoonshineFields))
        self.encoder.embed_tokens = cast("Decoder", self.model).embed_tokens  # there are no others

    def pull(self, weights: Weights) -> None:
        weights.ignore("proj_out")  # the head is tied
        super().pull(weights)
        encoder = weights.renamed(_ENCODER_NAMES) / "model.encoder"
        for name, module in self.encoder.named_children():
            if name != "embed_tokens":
                load(module, encoder / name)

    def encoded(self, sources: Sequence[SourceInput], step: ForwardContext) -> InLayers[Tensor]:
        lengths = step.query_lens_host
        samples = [each.features[0] for each in sources if each.features is not None]
        stream = torch.cat([self.encoder.convolved(*each) for each in zip(samples, lengths, strict=True)])
        with use_context(step):
            states = self.encoder(step.positions, step.positions, stream)
        yield from ()  # it is computed without a pause
        return states
