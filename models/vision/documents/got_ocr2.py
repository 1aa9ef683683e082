"""GOT-OCR 2: SAM's tower, two convolutions and a linear layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.layers.linear import Linear
from models.vision.documents.sam import Halving, SamFields, SamVision
from models.vision.tower import TowerInput, TowerSetup
from models.vision.tower_inputs import cut_tiles, read_tower_fields


class GotOcr2Tower(nn.Module):
    levels = 0

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        self.fields = fields = read_tower_fields(setup.config["vision_config"], SamFields)
        self.sam = SamVision(fields, setup.pictures)
        channels, size = fields.output_channels, setup.hidden_size
        self.halving = Halving((channels, 2 * channels, size), ("conv_upsampler1", "conv_upsampler2"))
        self.projector = Linear(size, size, bias=True)

    def pull(self, weights: Weights) -> None:
        projector = weights.first("model.multi_modal_projector", "multi_modal_projector")
        load(self.sam, weights.first("model.vision_tower", "vision_tower"))
        load(self.halving, projector)
        load(self.projector, projector / "multimodal_projector")

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        tiles = cut_tiles(items, self.fields.image_size, self.fields.patch_size)
        rows = self.projector(self.halving(self.sam(tiles)).flatten(0, 1))
        return list(rows.split([item.embeddings for item in items]))
