"""LLaVA-NeXT and OneVision: LLaVA's tower for a whole picture and its tiles, whose rows end with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.checkpoint.weights import Weights, load
from models.media.tiling.llava_next import most_tiles, shrunk
from models.vision.blocks import Learned
from models.vision.llava import LlavaTower
from models.vision.tower import TowerInput, TowerSetup
from models.vision.tower_inputs import cut_tiles
from models.vision.vit import read_vit


class LlavaNextTower(LlavaTower):
    aspect: ClassVar[str] = ""
    """What vision_aspect_ratio is if config.json does not tell, where the family has that field."""

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__(setup)
        vit = read_vit(setup.config)
        self.side, self.patch = vit.image_size, vit.patch_size
        self.newline = Learned(setup.hidden_size)
        self.most = most_tiles(self.aspect and (setup.config.get("vision_aspect_ratio") or self.aspect))

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        name = "image_newline"
        load(self.newline, weights / (name if name in weights else f"model.{name}"))

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        tiles = cut_tiles(items, self.side, self.patch)
        rows = torch.stack(super().encode(tiles))  # [tiles, patches, H]
        counts = [len(item.pixels) // self.side for item in items]
        return [self._packed(*each) for each in zip(rows.split(counts), items, strict=True)]

    def _packed(self, rows: Tensor, item: TowerInput) -> Tensor:
        """The rows of the whole picture, then those of the tiles side by side, without their padding."""
        down, height, width = item.grid
        across = self.side // self.patch
        tiles = rows[1:].view(down, -1, across, across, rows.shape[-1]).transpose(1, 2)
        tiles = tiles.reshape(down * across, -1, rows.shape[-1])
        top, left = (tiles.shape[0] - height) // 2, (tiles.shape[1] - width) // 2
        kept = tiles[top : top + height, left : left + width]
        if (size := shrunk(height, width, across, self.most)) != (height, width):
            channels_first = kept.permute(2, 0, 1).unsqueeze(0)
            kept = F.interpolate(channels_first, size, mode="bilinear")[0].permute(1, 2, 0)
        newlines = self.newline.weight.expand(len(kept), 1, -1)
        return torch.cat([rows[0], torch.cat([kept, newlines], dim=1).flatten(0, 1)])


class LlavaOnevisionTower(LlavaNextTower):
    usual: ClassVar[Mapping[str, object]] = {
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    aspect = "anyres_max_9"
