"""Gemma 4 without a tower: squares of pixels, between norms, are the text's embeddings but for one matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import Eps, Size
from models.layers.linear import Linear
from models.layers.norm import LayerNorm, PlainRMSNorm
from models.vision.blocks import Learned
from models.vision.gemma4 import PixelPatches, places_in
from models.vision.tower import TowerInput, TowerSetup
from models.vision.tower_inputs import read_tower_fields

_EPS = 1e-5


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a vision_config."""

    patch_size: Size = 16
    pooling_kernel_size: Size = 3
    mm_embed_dim: Size = 3840
    mm_posemb_size: Size = 1120
    rms_norm_eps: Eps = 1e-6


class _ChannelOrder:
    """The order of a square's numbers by channel; the checkpoint has the channels of each pixel together."""

    def order(self, rows: int) -> Tensor:
        return torch.arange(rows).view(-1, 3).t().flatten()


class Gemma4UnifiedTower(nn.Module):
    levels = 0

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        fields = read_tower_fields(setup.config["vision_config"], _Fields)
        text: Mapping[str, Any] = setup.config["text_config"]
        self.sees_media = text.get("use_bidirectional_attention") == "vision"
        size, self.merge = fields.mm_embed_dim, fields.pooling_kernel_size
        side = fields.patch_size * self.merge
        self.pixel_norm = LayerNorm(3 * side * side, _EPS, order=_ChannelOrder())
        self.patches = PixelPatches(size, side, setup.pictures, bias=True)
        self.patch_norm, self.place_norm = LayerNorm(size, _EPS), LayerNorm(size, _EPS)
        self.places = Learned(fields.mm_posemb_size, 2, size, name="pos_embedding")
        self.norm = PlainRMSNorm(size, fields.rms_norm_eps)
        self.projection = Linear(size, setup.hidden_size)

    def pull(self, weights: Weights) -> None:
        weights.ignore("model.embed_audio")
        own, projector = weights / "model.vision_embedder", weights / "model.embed_vision"
        load(self.pixel_norm, own / "patch_ln1")
        load(self.patches, own / "patch_dense")
        load(self.patch_norm, own / "patch_ln2")
        load(self.places, own)
        load(self.place_norm, own / "pos_norm")
        load(self.norm, projector)
        load(self.projection, projector / "embedding_projection")

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        pixels = self.pixel_norm(self.patches.cut(items))
        rows = self.patch_norm(ops.linear(pixels, self.patches.weight, self.patches.bias))
        squares = [places_in(item.grid[1] // self.merge, item.grid[2] // self.merge) for item in items]
        column, row = torch.cat(squares, dim=1).to(rows.device)
        rows = self.place_norm(rows + (self.places.weight[column, 0] + self.places.weight[row, 1]))
        made = self.projection(self.norm(rows))
        return list(made.split([item.embeddings for item in items]))
