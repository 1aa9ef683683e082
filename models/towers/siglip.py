"""Families with a SigLIP tower, whose rows become as wide as the text: Gemma 3, PaliGemma, Idefics3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Annotated, ClassVar

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError
from models.layers.linear import Linear, frozen
from models.layers.norm import RMSNorm, enter
from models.towers.blocks import merge_squares
from models.towers.tower import InLayers, TowerInput, TowerSetup, cut_tiles, read_tower_fields
from models.towers.vit import PROJECTORS, TOWERS, VisionTransformer, read_vit


class _SiglipTower(nn.Module):
    levels = 0
    scopes: ClassVar[tuple[str, ...]] = TOWERS
    usual: ClassVar[Mapping[str, object] | None] = None
    """Fields of the tower that config.json leaves out."""

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        self.fields = vit = read_vit(setup.config, self.usual)
        self.vision, self.last_norm = VisionTransformer(vit, setup.pictures), vit.norm()

    def pull(self, weights: Weights) -> None:
        tower = weights.first(*self.scopes)
        tower.ignore("head")
        load(self.vision, tower)
        load(self.last_norm, tower / "post_layernorm")

    def rows(self, items: Sequence[TowerInput]) -> InLayers[Tensor]:
        """The normalised rows of all patches [N * patches, size]."""
        return enter(self.last_norm, *(yield from self.vision(items)))[0]


class PaliGemmaTower(_SiglipTower):
    sees_media: ClassVar[bool] = True
    sees_prompt: ClassVar[bool] = True

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__(setup)
        self.projection = Linear(self.fields.hidden_size, setup.hidden_size, bias=True)

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        load(self.projection, weights.first(*PROJECTORS) / "linear")

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        return list(self.projection((yield from self.rows(items))).chunk(len(items)))


class Gemma3Tower(_SiglipTower):
    """The means of squares of patches are normalised ahead of the matrix."""

    sees_media: ClassVar[bool] = True
    projection: nn.Parameter

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__(setup)
        self.norm = RMSNorm(self.fields.hidden_size, self.fields.layer_norm_eps, offset=1.0)
        self.widths = self.fields.hidden_size, setup.hidden_size

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        projector = weights.first(*PROJECTORS)
        load(self.norm, projector / "mm_soft_emb_norm")
        matrix = projector.take("mm_input_projection_weight", self.widths)  # [inputs, outputs]
        self.projection = frozen(ops.pack(matrix.t(), plain=True))

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        count, side = isqrt(items[0].embeddings), items[0].grid[1]
        rows = yield from self.rows(items)
        squares = rows.view(len(items), count, side // count, count, side // count, -1)
        means = squares.mean((2, 4)).flatten(0, 2)
        return list(ops.linear(self.norm(means), self.projection).chunk(len(items)))


class _Idefics3Fields(msgspec.Struct, frozen=True):
    scale_factor: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    """The rows and columns of patches that become one token."""


class Idefics3Tower(_SiglipTower):
    """Squares of the rows of tiles are merged ahead of the matrix, also in SmolVLM."""

    scopes = ("model.vision_model", "vision_model")
    usual = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__(setup)
        vit = self.fields
        self.merge = read_tower_fields(setup.config, _Idefics3Fields).scale_factor
        self.side, self.patch = vit.image_size, vit.patch_size
        self.across = self.side // self.patch
        if self.across % self.merge:
            raise ConfigError(f"config.json: {self.across} patches are not whole squares of {self.merge}")
        self.projection = Linear(vit.hidden_size * self.merge**2, setup.hidden_size)

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        connector = weights.first("model.connector", "connector")
        load(self.projection, connector / "modality_projection.proj")
        table = self.vision.positions.weight
        self.vision.positions.weight = frozen(table[_buckets(self.across).to(table.device)])

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        rows = yield from self.rows(cut_tiles(items, self.side, self.patch))
        squares = merge_squares(rows, self.across, self.across, self.merge)
        return list(self.projection(squares).split([item.embeddings for item in items]))


def _buckets(across: int) -> Tensor:
    """The position of each patch of a whole tile: that into which its fraction of the side falls, which
    rounding makes the one before in places."""
    bounds = torch.arange(1 / across, 1.0, 1 / across)
    fractions = (torch.arange(across, dtype=torch.float32) * (1.0 / torch.tensor(across))).clamp(max=1 - 1e-6)
    bucket = torch.bucketize(fractions, bounds, right=True)
    return (bucket.unsqueeze(1) * across + bucket).flatten()
