"""LLaVA-1.5: what one of the last layers of a CLIP or SigLIP tower gives, projected to the text's width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError
from models.layers.linear import Linear
from models.layers.mlp import activation_kind
from models.vision.tower import TowerInput, TowerSetup
from models.vision.vit import VisionTransformer, read_vit

_TOWERS = (
    "model.vision_tower.vision_model",
    "vision_tower.vision_model",
    "model.vision_tower",
    "vision_tower",
)
_PROJECTORS = ("model.multi_modal_projector", "multi_modal_projector")
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

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        try:
            fields = msgspec.convert(setup.config, _Fields)
        except msgspec.ValidationError as error:
            raise ConfigError(f"config.json: {error}") from None
        vit, layer, size = read_vit(setup.config), fields.vision_feature_layer, setup.hidden_size
        count = vit.num_hidden_layers
        without = count - layer if layer >= 0 else -1 - layer
        if not 0 <= without <= count:
            raise ConfigError(f"config.json: the field 'vision_feature_layer' is {layer}, of {count} layers")
        self.vision = VisionTransformer(vit, setup.pictures, without=without)
        self.first_row = int(fields.vision_feature_select_strategy == "default")
        bias, activation = fields.multimodal_projector_bias, activation_kind(fields.projector_hidden_act)
        self.inner = Linear(vit.hidden_size, size, bias=bias, activation=activation)
        self.outer = Linear(size, size, bias=bias)

    def pull(self, weights: Weights) -> None:
        tower, projector = weights.first(*_TOWERS), weights.first(*_PROJECTORS)
        tower.ignore(*_UNUSED)
        load(self.vision, tower)
        load(self.inner, projector / "linear_1")
        load(self.outer, projector / "linear_2")

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        delta, stream = self.vision(items)
        rows = (stream if delta is None else stream + delta).view(len(items), self.vision.rows, -1)
        return list(self.outer(self.inner(rows[:, self.first_row :].flatten(0, 1))).chunk(len(items)))
