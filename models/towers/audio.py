"""Towers that hear: features of sound pass convolutions, then layers as Whisper's encoder has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, Size
from models.context import ForwardContext
from models.layers.cross_attention import KeysWithoutBias
from models.layers.linear import Linear, frozen
from models.layers.mlp import MLP, activation_kind
from models.layers.norm import LayerNorm, enter
from models.media.whisper import PIECE_FRAMES
from models.parallel.rank_shares import Span
from models.towers.blocks import WHOLE, Learned, Projector, TowerLayer, TowerLayers, TowerNames, segments
from models.towers.tower import InLayers, TowerInput, TowerSetup, advance, read_tower_fields
from models.towers.vit import PROJECTORS

EPS = 1e-5
_WINDOW = 3
"""The frames that a convolution reads for each row that it gives."""
_CHUNKS = 8
"""The chunks of a sound that pass convolutions together."""
_TOGETHER = 8
"""The pieces that pass a layer together."""
_PIECE_ROWS = PIECE_FRAMES // 2
_OLDER_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
"""What newer files call the fields of an encoder of sound, and what older ones do."""
_NAMES = TowerNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    mlp="",
)


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


class HearingLayer(TowerLayer):
    def __init__(self, size: int, heads: int, inner: int, activation: str) -> None:
        mlp = MLP(size, inner, WHOLE, activation=activation, names=("fc1", "fc2"), bias=True)
        super().__init__(size, heads, mlp, (LayerNorm(size, EPS), LayerNorm(size, EPS)), _NAMES)
        whole = Span.whole(size)
        self.qkv = KeysWithoutBias(size, [whole] * 3, bias=True, sources=_NAMES.qkv)


class AudioFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an encoder of sound, which config.json may leave out where they are the usual ones."""

    d_model: Size = 1280
    encoder_layers: Size = 32
    encoder_attention_heads: Size = 20
    encoder_ffn_dim: Size = 5120
    num_mel_bins: Size = 128
    max_source_positions: Size = 1500
    activation_function: str = "gelu"

    def layers(self) -> TowerLayers:
        sizes = self.d_model, self.encoder_attention_heads, self.encoder_ffn_dim
        return TowerLayers(self.encoder_layers, lambda: HearingLayer(*sizes, self.activation_function))


class WhisperEncoder(nn.Module):
    """Whisper's encoder: features of sounds [bands, frames] pass two convolutions and layers."""

    def __init__(self, fields: AudioFields) -> None:
        super().__init__()
        size = fields.d_model
        self.conv1 = Convolution(fields.num_mel_bins, size, 1)
        self.conv2 = Convolution(size, size, 2)
        self.embed_positions = Learned(fields.max_source_positions, size, name="weight")
        self.layers = fields.layers()
        self.layer_norm = LayerNorm(size, EPS)

    def forward(self, features: Sequence[Tensor], step: ForwardContext) -> InLayers[Tensor]:
        """The rows [S, size] of sounds that fill all positions; `step` is the context of these rows."""
        rows = self.conv2(self.conv1([each.t() for each in features]))
        stream = torch.cat([each + self.embed_positions.weight for each in rows])
        delta, stream = yield from self.layers(step, stream)
        return enter(self.layer_norm, delta, stream)[0]


class _WhisperTower(WhisperEncoder):
    """Whisper's encoder, whose rows a projector makes as wide as the text."""

    levels = 0

    def pull(self, weights: Weights) -> None:
        tower, projector = weights.first("model.audio_tower", "audio_tower"), weights.first(*PROJECTORS)
        for name, module in self.named_children():
            load(module, projector if name == "projector" else tower / name)


class Qwen2AudioTower(_WhisperTower):
    """The rows are halved by means of two ahead of the last norm."""

    def __init__(self, setup: TowerSetup) -> None:
        fields = read_tower_fields(_audio_part(setup.config), AudioFields)
        super().__init__(fields)
        self.projector = nn.ModuleDict({"linear": Linear(fields.d_model, setup.hidden_size, bias=True)})

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        counts = [-(-item.grid[2] // 2) for item in items]  # what lies behind is silence that was added
        convolved = self.conv2(self.conv1([item.pixels.t() for item in items]))
        table = self.embed_positions.weight
        rows = [each[:count] + table[:count] for each, count in zip(convolved, counts, strict=True)]
        step = segments(counts, table.device)
        delta, stream = yield from self.layers(step, torch.cat(rows))
        hidden = stream if delta is None else ops.add(stream, delta)
        means = [each[: len(each) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for each in hidden.split(counts)]
        projected = self.projector["linear"](self.layer_norm(torch.cat(means)))
        return list(projected.split([len(each) for each in means]))


class _Activation(msgspec.Struct, frozen=True):
    projector_hidden_act: str = "gelu"


class VoxtralTower(_WhisperTower):
    """Sounds pass in pieces of 30 seconds, each alone; several rows side by side become an embedding."""

    def __init__(self, setup: TowerSetup) -> None:
        fields = read_tower_fields(_audio_part(setup.config), AudioFields)
        super().__init__(fields)
        size, self.stacked = fields.d_model, fields.encoder_ffn_dim
        if fields.max_source_positions != _PIECE_ROWS or (_PIECE_ROWS * size) % self.stacked:
            raise ConfigError(
                f"config.json: 'audio_config' must have 'max_source_positions' {_PIECE_ROWS}, and rows of "
                f"which whole ones are 'intermediate_size' {self.stacked} numbers"
            )
        kind = read_tower_fields(setup.config, _Activation).projector_hidden_act
        self.projector = Projector(self.stacked, setup.hidden_size, activation=kind, bias=False)

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        pieces = [piece for item in items for piece in item.pixels.split(PIECE_FRAMES, dim=1)]
        groups = [pieces[first : first + _TOGETHER] for first in range(0, len(pieces), _TOGETHER)]
        steps = [segments([_PIECE_ROWS] * len(group), pieces[0].device) for group in groups]
        hidden = yield from _side_by_side([self(*each) for each in zip(groups, steps, strict=True)])
        rows = self.projector(torch.cat(hidden).view(-1, self.stacked))
        return list(rows.split([item.embeddings for item in items]))


def _side_by_side(runs: Sequence[InLayers[Tensor]]) -> InLayers[list[Tensor]]:
    """Computations of the same layers: all of them pass a layer before the first one passes the next."""
    while True:
        made = [advance(run, 1) for run in runs]
        if done := [each for each in made if each is not None]:
            return done
        yield


class _Qwen3Fields(AudioFields, frozen=True, kw_only=True):
    d_model: Size = 1024
    encoder_layers: Size = 24
    encoder_attention_heads: Size = 16
    encoder_ffn_dim: Size = 4096
    n_window: Size = 50
    """Half the frames of a chunk, which convolutions read alone."""
    n_window_infer: Size = 800
    """The frames whose rows see each other."""
    downsample_hidden_size: Size = 480
    output_dim: Size = 3584


class Qwen3ASRTower(nn.Module):
    """Three convolutions over chunks of frames and bands, layers over windows of chunks, and a projector."""

    levels = 0

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        if "classify_num" in setup.config:
            raise ConfigError(
                "config.json: the field 'classify_num' says that this model aligns texts with sounds, which "
                "is not served: take a Qwen3-ASR that transcribes, such as Qwen/Qwen3-ASR-0.6B"
            )
        fields = read_tower_fields(_audio_part(setup.config), _Qwen3Fields)
        if fields.output_dim != setup.hidden_size:
            raise ConfigError(
                f"config.json: 'output_dim' of 'audio_config' is {fields.output_dim}, and must be the "
                f"'hidden_size' {setup.hidden_size} of 'text_config'"
            )
        size, channels = fields.d_model, fields.downsample_hidden_size
        self.chunk, self.chunks = 2 * fields.n_window, max(1, fields.n_window_infer // (2 * fields.n_window))
        self.conv2d1 = PlaneConvolution(1, channels)
        self.conv2d2 = PlaneConvolution(channels, channels)
        self.conv2d3 = PlaneConvolution(channels, channels)
        self.conv_out = Linear(channels * thrice_halved(fields.num_mel_bins), size)
        self.positions = Waves(thrice_halved(self.chunk), size)
        self.layers = fields.layers()
        self.ln_post = LayerNorm(size, EPS)
        kind = activation_kind(fields.activation_function)
        self.linear_1 = Linear(size, size, bias=True, activation=kind)
        self.linear_2 = Linear(size, setup.hidden_size, bias=True)

    def pull(self, weights: Weights) -> None:
        tower = weights.first("model.audio_tower", "thinker.audio_tower", "audio_tower")
        projector = weights.first(*PROJECTORS)
        if "proj1.weight" in tower:  # as Qwen published it
            projector = tower.renamed({"linear_1": "proj1", "linear_2": "proj2"})
        for name, module in self.named_children():
            load(module, (projector if name.startswith("linear") else tower) / name)

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        frames = [item.pixels.shape[1] for item in items]
        counts = [
            each // self.chunk * len(self.positions.table) + thrice_halved(each % self.chunk)
            for each in frames
        ]
        rows = [self._convolved(item.pixels)[:count] for item, count in zip(items, counts, strict=True)]
        window = self.chunks * len(self.positions.table)
        lengths = [min(window, count - first) for count in counts for first in range(0, count, window)]
        step = segments(lengths, rows[0].device)
        delta, stream = yield from self.layers(step, torch.cat(rows))
        hidden, _ = enter(self.ln_post, delta, stream)
        return list(self.linear_2(self.linear_1(hidden)).split(counts))

    def _convolved(self, features: Tensor) -> Tensor:
        """The rows of all chunks of a sound [bands, frames], of which the last is filled up with zeros."""
        bands, frames = features.shape
        chunks = F.pad(features, (0, -frames % self.chunk)).view(bands, -1, self.chunk).transpose(0, 1)
        pieces: list[Tensor] = []
        for some in chunks.unsqueeze(1).split(_CHUNKS):  # what they become takes much memory
            plane = self.conv2d3(self.conv2d2(self.conv2d1(some)))  # [chunks, channels, bands / 8, rows]
            pieces.append(self.conv_out(plane.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)))
        rows = torch.cat(pieces)
        return (rows.unflatten(0, (-1, len(self.positions.table))) + self.positions.table).flatten(0, 1)


class PlaneConvolution(nn.Module):
    """Planes [N, inputs, H, W] -> [N, size, H / 2, W / 2]: a number by the nine around it; a gelu follows."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.inputs, self.size = inputs, size

    def pull(self, weights: Weights) -> None:
        kernel = weights.take("weight", [self.size, self.inputs, _WINDOW, _WINDOW])
        self.weight = frozen(ops.pack(kernel.flatten(1), plain=True))
        self.bias = frozen(weights.take("bias", [self.size]))

    def forward(self, planes: Tensor) -> Tensor:
        height = -(-planes.shape[2] // 2)
        windows = F.unfold(planes, _WINDOW, padding=1, stride=2).transpose(1, 2)  # [N, places, inputs * 9]
        rows = ops.linear(windows.flatten(0, 1), self.weight, self.bias, kind="gelu")
        return rows.view(len(planes), -1, self.size).transpose(1, 2).unflatten(2, (height, -1))


class Waves(nn.Module):
    """A table of positions that is computed: sines in its first half, and cosines in the other."""

    table: Tensor  # [count, size]

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.count, self.size = count, size

    def pull(self, weights: Weights) -> None:
        half = self.size // 2
        steps = torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half).float())
        angles = torch.arange(self.count).unsqueeze(1) * steps
        self.table = torch.cat([angles.sin(), angles.cos()], dim=1).to(weights.device, weights.dtype)


def thrice_halved(count: int) -> int:
    """How many numbers three convolutions leave of so many in a row, each of which halves them."""
    return -(-count // 8)


def _audio_part(config: Mapping[str, Any]) -> dict[str, object]:
    part = config.get("audio_config")
    given: Mapping[str, object] = part if isinstance(part, Mapping) else {}
    renamed = {_OLDER_NAMES[name]: value for name, value in given.items() if name in _OLDER_NAMES}
    return {**renamed, **given}
