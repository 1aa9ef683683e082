"""Gemma 3 and PaliGemma: what a SigLIP tower gives, brought to the text's width by one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import ClassVar

from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.layers.linear import Linear, frozen
from models.layers.norm import RMSNorm, enter
from models.vision.tower import TowerInput, TowerSetup
from models.vision.vit import PROJECTORS, TOWERS, VisionTransformer, read_vit


class _SiglipTower(nn.Module):
    levels = 0
    sees_media: ClassVar[bool] = True

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        self.fields = vit = read_vit(setup.config)
        self.vision, self.last_norm = VisionTransformer(vit, setup.pictures), vit.norm()

    def pull(self, weights: Weights) -> None:
        tower = weights.first(*TOWERS)
        tower.ignore("head")
        load(self.vision, tower)
        load(self.last_norm, tower / "post_layernorm")

    def rows(self, items: Sequence[TowerInput]) -> Tensor:
        """The normalised rows of all patches [N * patches, size]."""
        return enter(self.last_norm, *self.vision(items))[0]


class PaliGemmaTower(_SiglipTower):
    sees_prompt: ClassVar[bool] = True

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__(setup)
        self.projection = Linear(self.fields.hidden_size, setup.hidden_size, bias=True)

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        load(self.projection, weights.first(*PROJECTORS) / "linear")

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        return list(self.projection(self.rows(items)).chunk(len(items)))


class Gemma3Tower(_SiglipTower):
    """The means of squares of patches are normalised ahead of the matrix."""

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

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        count, side = isqrt(items[0].embeddings), items[0].grid[1]
        squares = self.rows(items).view(len(items), count, side // count, count, side // count, -1)
        means = squares.mean((2, 4)).flatten(0, 2)
        return list(ops.linear(self.norm(means), self.projection).chunk(len(items)))
