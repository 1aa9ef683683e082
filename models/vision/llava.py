"""LLaVA: what one of the last layers of a CLIP, SigLIP or Pixtral tower gives, as wide as the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar, Literal

import msgspec
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.vision.pixtral import PixtralFields, PixtralVision
from models.vision.projector import Projector
from models.vision.tower import TowerInput, TowerSetup
from models.vision.tower_inputs import read_tower_fields, unused_layers
from models.vision.vit import PROJECTORS, TOWERS, VisionTransformer, read_vit

_UNUSED = ("post_layernorm", "head")


class _Fields(msgspec.Struct, frozen=True):
    """The fields of config.json; those that it leaves out have the values of transformers."""

    vision_feature_layer: int = -2
    """The layer whose result is used: 0 is what goes into the first one, -1 what the last one gives."""
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    """Whether the first row, which is the class token where there is one, is left out."""
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True


class LlavaTower(nn.Module):
    levels = 0
    usual: ClassVar[Mapping[str, object]] = {}
    """Fields that config.json leaves out, where they differ from those of LLaVA-1.5."""

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        config: dict[str, Any] = {**self.usual, **setup.config}
        fields = read_tower_fields(config, _Fields)
        layer, pictures = fields.vision_feature_layer, setup.pictures
        self.vision: PixtralVision | VisionTransformer
        if config["vision_config"].get("model_type") == "pixtral":
            pixtral = read_tower_fields(config["vision_config"], PixtralFields)
            size, without = pixtral.hidden_size, unused_layers(layer, pixtral.num_hidden_layers)
            self.vision = PixtralVision(pixtral, pictures, without=without)
            self.others = self.first_row = 0
        else:
            vit = read_vit(config)
            size, without = vit.hidden_size, unused_layers(layer, vit.num_hidden_layers)
            self.vision = VisionTransformer(vit, pictures, without=without)
            self.others = int(vit.has_class_token)
            self.first_row = int(fields.vision_feature_select_strategy == "default")
        self.projector = Projector(
            size,
            setup.hidden_size,
            activation=fields.projector_hidden_act,
            bias=fields.multimodal_projector_bias,
        )

    def pull(self, weights: Weights) -> None:
        tower = weights.first(*TOWERS)
        tower.ignore(*_UNUSED)
        load(self.vision, tower)
        load(self.projector, weights.first(*PROJECTORS))

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        delta, stream = self.vision(items)
        rows = self.projector(stream if delta is None else stream + delta)
        pieces = rows.split([prod(item.grid) + self.others for item in items])
        return [piece[self.first_row :] for piece in pieces]
