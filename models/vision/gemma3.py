"""Gemma 3: squares of what a SigLIP tower gives are averaged, normalised and brought to the text's width."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import ClassVar

from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.layers.linear import frozen
from models.layers.norm import RMSNorm, enter
from models.vision.tower import TowerInput, TowerSetup
from models.vision.vit import PROJECTORS, TOWERS, VisionTransformer, read_vit


class Gemma3Tower(nn.Module):
    levels = 0
    sees_media: ClassVar[bool] = True

    projection: nn.Parameter

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        vit = read_vit(setup.config)
        self.vision, self.last_norm = VisionTransformer(vit, setup.pictures), vit.norm()
        self.norm = RMSNorm(vit.hidden_size, vit.layer_norm_eps, offset=1.0)
        self.widths = vit.hidden_size, setup.hidden_size

    def pull(self, weights: Weights) -> None:
        tower, projector = weights.first(*TOWERS), weights.first(*PROJECTORS)
        tower.ignore("head")
        load(self.vision, tower)
        load(self.last_norm, tower / "post_layernorm")
        load(self.norm, projector / "mm_soft_emb_norm")
        matrix = projector.take("mm_input_projection_weight", self.widths)  # [inputs, outputs]
        self.projection = frozen(ops.pack(matrix.t(), plain=True))

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        rows, _ = enter(self.last_norm, *self.vision(items))
        count, side = isqrt(items[0].embeddings), items[0].grid[1]
        squares = rows.view(len(items), count, side // count, count, side // count, -1)
        means = squares.mean((2, 4)).flatten(0, 2)
        return list(ops.linear(self.norm(means), self.projection).chunk(len(items)))
