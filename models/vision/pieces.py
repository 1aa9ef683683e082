"""Towers that hear sounds in pieces of 30 seconds, each of which passes an encoder like Whisper's alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError
from models.layers.norm import LayerNorm, enter
from models.media.whisper import PIECE_FRAMES
from models.vision.blocks import Learned, Projector, segments
from models.vision.hearing import EPS, AudioFields, Convolution
from models.vision.tower import InLayers, TowerInput, TowerSetup, advance, read_tower_fields

_TOGETHER = 8
"""The pieces that pass a layer together."""
_ROWS = PIECE_FRAMES // 2
_OLDER_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
"""What newer files call the fields of an encoder of sound, and what older ones do."""


class _Activation(msgspec.Struct, frozen=True):
    projector_hidden_act: str = "gelu"


class VoxtralTower(nn.Module):
    """Whisper's encoder over whole pieces, of whose rows several side by side become an embedding."""

    levels = 0

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        fields = read_tower_fields(_audio_part(setup.config), AudioFields)
        size, self.stacked = fields.d_model, fields.encoder_ffn_dim
        if fields.max_source_positions != _ROWS or (_ROWS * size) % self.stacked:
            raise ConfigError(
                f"config.json: 'audio_config' must have 'max_source_positions' {_ROWS}, and rows of which "
                f"whole ones are 'intermediate_size' {self.stacked} numbers"
            )
        self.conv1 = Convolution(fields.num_mel_bins, size, 1)
        self.conv2 = Convolution(size, size, 2)
        self.embed_positions = Learned(_ROWS, size, name="weight")
        self.layers = fields.layers()
        self.layer_norm = LayerNorm(size, EPS)
        kind = read_tower_fields(setup.config, _Activation).projector_hidden_act
        self.projector = Projector(self.stacked, setup.hidden_size, activation=kind, bias=False)

    def pull(self, weights: Weights) -> None:
        tower = weights.first("model.audio_tower", "audio_tower")
        projector = weights.first("model.multi_modal_projector", "multi_modal_projector")
        for name, module in self.named_children():
            load(module, projector if name == "projector" else tower / name)

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        pieces = [piece for item in items for piece in item.pixels.t().split(PIECE_FRAMES)]
        groups = [pieces[first : first + _TOGETHER] for first in range(0, len(pieces), _TOGETHER)]
        hidden = yield from _side_by_side([self._heard(group) for group in groups])
        rows = self.projector(torch.cat(hidden).view(-1, self.stacked))
        return list(rows.split([item.embeddings for item in items]))

    def _heard(self, pieces: Sequence[Tensor]) -> InLayers[Tensor]:
        table = self.embed_positions.weight
        rows = torch.cat([each + table for each in self.conv2(self.conv1(pieces))])
        step = segments([_ROWS] * len(pieces), rows.device)
        delta, stream = yield from self.layers(step, rows)
        return enter(self.layer_norm, delta, stream)[0]


def _side_by_side(runs: Sequence[InLayers[Tensor]]) -> InLayers[list[Tensor]]:
    """Computations of the same layers: all of them pass a layer before the first one passes the next."""
    while True:
        made = [advance(run, 1) for run in runs]
        if done := [each for each in made if each is not None]:
            return done
        yield


def _audio_part(config: Mapping[str, Any]) -> dict[str, object]:
    part = config.get("audio_config")
    given: Mapping[str, object] = part if isinstance(part, Mapping) else {}
    return {_OLDER_NAMES.get(name, name): value for name, value in given.items()}
