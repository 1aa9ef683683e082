"""Idefics3 and SmolVLM: a SigLIP tower for tiles, of whose rows squares are merged and projected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError
from models.layers.linear import Linear, frozen
from models.layers.norm import enter
from models.vision.blocks import merge_squares
from models.vision.tower import TowerInput, TowerSetup, cut_tiles, read_tower_fields
from models.vision.vit import VisionTransformer, read_vit

_USUAL = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
"""Fields of the tower that config.json leaves out."""


class _Fields(msgspec.Struct, frozen=True):
    scale_factor: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    """The rows and columns of patches that become one token."""


class Idefics3Tower(nn.Module):
    levels = 0

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        vit = read_vit(setup.config, _USUAL)
        self.merge = read_tower_fields(setup.config, _Fields).scale_factor
        self.side, self.patch = vit.image_size, vit.patch_size
        self.across = self.side // self.patch
        if self.across % self.merge:
            raise ConfigError(f"config.json: {self.across} patches are not whole squares of {self.merge}")
        self.vision = VisionTransformer(vit, setup.pictures)
        self.last_norm = vit.norm()
        self.projection = Linear(vit.hidden_size * self.merge**2, setup.hidden_size)

    def pull(self, weights: Weights) -> None:
        tower = weights.first("model.vision_model", "vision_model")
        load(self.vision, tower)
        load(self.last_norm, tower / "post_layernorm")
        connector = weights.first("model.connector", "connector")
        load(self.projection, connector / "modality_projection.proj")
        table = self.vision.positions.weight
        self.vision.positions.weight = frozen(table[_buckets(self.across).to(table.device)])

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        normed, _ = enter(self.last_norm, *self.vision(cut_tiles(items, self.side, self.patch)))
        squares = merge_squares(normed, self.across, self.across, self.merge)
        return list(self.projection(squares).split([item.embeddings for item in items]))


def _buckets(across: int) -> Tensor:
    """The position of each patch of a whole tile: that into which its fraction of the side falls, which
    rounding makes the one before in places."""
    bounds = torch.arange(1 / across, 1.0, 1 / across)
    fractions = (torch.arange(across, dtype=torch.float32) * (1.0 / torch.tensor(across))).clamp(max=1 - 1e-6)
    bucket = torch.bucketize(fractions, bounds, right=True)
    return (bucket.unsqueeze(1) * across + bucket).flatten()
