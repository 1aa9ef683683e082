"""The towers of CLIP and SigLIP, and the layers that their texts have as well.

A tower is given up to its last layer: which rows of it are used, and what follows, is for the model that has
the tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, cast

import msgspec
import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, Eps, Size
from models.context import use_context
from models.layers.mlp import MLP
from models.layers.norm import LayerNorm
from models.media.files import PictureSettings
from models.vision.blocks import (
    WHOLE,
    Learned,
    PatchEmbedding,
    PixelPatches,
    TowerLayer,
    TowerLayers,
    TowerNames,
    segments,
)
from models.vision.grids import resized_table
from models.vision.tower import TowerInput

TOWERS = (
    "model.vision_tower.vision_model",
    "vision_tower.vision_model",
    "model.vision_tower",
    "vision_tower",
)
PROJECTORS = ("model.multi_modal_projector", "multi_modal_projector")
"""The scopes in which checkpoints of LLaVA's kind have their tower, and what follows it."""
NAMES = TowerNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norms=("layer_norm1", "layer_norm2"),
)


class LayerFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that layers need, in towers and texts."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size = 12
    num_attention_heads: Size
    hidden_act: str
    layer_norm_eps: Eps

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def layers(self, *, causal: bool = False, without: int = 0, names: TowerNames = NAMES) -> TowerLayers:
        """Make all layers but the last ones, `without` in number, which a checkpoint may have unused."""

        def build() -> TowerLayer:
            norms = self.norm(), self.norm()
            return TowerLayer(
                self.hidden_size, self.num_attention_heads, self.mlp(), norms, names, causal=causal
            )

        return TowerLayers(self.num_hidden_layers - without, build, without)

    def norm(self) -> LayerNorm:
        return LayerNorm(self.hidden_size, self.layer_norm_eps)

    def mlp(self) -> MLP:
        sizes, names = (self.hidden_size, self.intermediate_size), ("fc1", "fc2")
        return MLP(*sizes, WHOLE, activation=self.hidden_act, names=names, bias=True)


class VitFields(LayerFields, frozen=True, kw_only=True):
    """The fields of a tower. Those that a config leaves out have the values of transformers' classes."""

    image_size: Size = 224
    num_patches: Size | None = None
    """The entries of a square table of positions, where pictures have any shape."""
    patch_size: Size
    num_channels: Literal[3] = 3

    has_class_token: bool = False
    """Whether a learned row comes ahead of the patches, and a norm ahead of the layers."""

    @property
    def rows(self) -> int:
        """The rows that a picture has, or may have if pictures have any shape."""
        return self.num_patches or (self.image_size // self.patch_size) ** 2 + self.has_class_token


_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "clip_vision_model": {
        **_BASE,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "has_class_token": True,
    },
    "siglip_vision_model": {
        **_BASE,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}


def read_vit(config: Mapping[str, object], usual: Mapping[str, object] | None = None) -> VitFields:
    """Read the fields of a vision_config; `config` is config.json, whole.

    `usual` has the fields that it leaves out, if these do not depend on its model_type.
    """
    given = config.get("vision_config")
    tower = cast("Mapping[str, object]", given) if isinstance(given, Mapping) else {}
    kind = tower.get("model_type")
    defaults = usual or (_DEFAULTS.get(kind) if isinstance(kind, str) else None)
    if defaults is None:
        known = " and ".join(_DEFAULTS)
        raise ConfigError(
            f"config.json: the tower is of the model_type {kind!r}, and only {known} are served"
        )
    known_values = {name: value for name, value in tower.items() if value is not None}
    try:
        return msgspec.convert({**known_values, **defaults, **known_values}, VitFields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"vision_config in config.json: {error}") from None


class VisionTransformer(nn.Module):
    """Pictures of one size -> the rows of all of them [N * rows, hidden_size], behind the last layer."""

    ignored = ("embeddings.position_ids",)  # constants that old checkpoints carry

    def __init__(self, fields: VitFields, pictures: PictureSettings, *, without: int = 0) -> None:
        """`without`: the last layers that are left out."""
        super().__init__()
        size, with_class = fields.hidden_size, fields.has_class_token
        self.rows = fields.rows
        self.class_token = Learned(size) if with_class else None
        self.patches = PatchEmbedding(size, fields.patch_size, pictures, bias=not with_class)
        self.positions = Learned(fields.rows, size, name="weight")
        self.first_norm = fields.norm() if with_class else None
        self.layers = fields.layers(without=without)

    def pull(self, weights: Weights) -> None:
        weights.ignore(*self.ignored)
        embeddings = weights / "embeddings"
        if self.class_token is not None and self.first_norm is not None:
            load(self.class_token, embeddings / "class_embedding")
            load(self.first_norm, weights / "pre_layrnorm")
        load(self.patches, embeddings / "patch_embedding")
        load(self.positions, embeddings / "position_embedding")
        load(self.layers, weights / "encoder.layers")

    def forward(self, items: Sequence[TowerInput]) -> tuple[Tensor | None, Tensor]:
        """The stream, and what is still to be added to it, ahead of it, as `enter` takes them."""
        hidden = self.patches(items).unflatten(0, (len(items), -1))  # [N, patches, size]
        if self.class_token is not None:
            first = self.class_token.weight.expand(len(items), 1, -1)
            hidden = torch.cat([first, hidden], dim=1)
        stream = (hidden + self.positions.weight).flatten(0, 1)
        if self.first_norm is not None:
            stream = self.first_norm(stream)
        with use_context(segments([self.rows] * len(items), stream.device)):
            return self.layers(stream)


class ShapedTransformer(VisionTransformer):
    """The same for pictures of any shape, to each of which the table of positions is fitted."""

    def __init__(self, fields: VitFields, pictures: PictureSettings) -> None:
        super().__init__(fields, pictures)
        self.patches = PixelPatches(fields.hidden_size, fields.patch_size, pictures, bias=True)

    def forward(self, items: Sequence[TowerInput]) -> tuple[Tensor | None, Tensor]:
        table = self.positions.weight
        positions = torch.cat([resized_table(table, item.grid[1:], "bilinear") for item in items])
        stream = self.patches(items) + positions
        with use_context(segments([prod(item.grid) for item in items], stream.device)):
            return self.layers(stream)
