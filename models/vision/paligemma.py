"""PaliGemma: what a SigLIP tower gives for each patch, brought to the text's width by one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.layers.linear import Linear
from models.layers.norm import enter
from models.vision.tower import TowerInput, TowerSetup
from models.vision.vit import PROJECTORS, TOWERS, VisionTransformer, read_vit


class PaliGemmaTower(nn.Module):
    levels = 0
    sees_media: ClassVar[bool] = True
    sees_prompt: ClassVar[bool] = True

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        vit = read_vit(setup.config)
        self.vision, self.last_norm = VisionTransformer(vit, setup.pictures), vit.norm()
        self.projection = Linear(vit.hidden_size, setup.hidden_size, bias=True)

    def pull(self, weights: Weights) -> None:
        tower, projector = weights.first(*TOWERS), weights.first(*PROJECTORS)
        tower.ignore("head")
        load(self.vision, tower)
        load(self.last_norm, tower / "post_layernorm")
        load(self.projection, projector / "linear")

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        rows, _ = enter(self.last_norm, *self.vision(items))
        return list(self.projection(rows).chunk(len(items)))
