"""The towers of CLIP and SigLIP, and the layers that their texts have as well.

A tower is given up to its last layer: which rows of it are used, and what follows, is for the model that has
the tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, Eps, Size
from models.layers.mlp import MLP
from models.layers.norm import LayerNorm, Norm
from models.media.files import PictureSettings
from models.towers.blocks import (
    WHOLE,
    Learned,
    PatchEmbedding,
    PixelPatches,
    TowerLayer,
    TowerLayers,
    TowerNames,
    segments,
)
from models.towers.grids import resized_table
from models.towers.tower import InLayers, TowerInput, read_tower_fields

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

    def layers(
        self, *, without: int = 0, names: TowerNames = NAMES, bias: bool = True, causal: bool = False
    ) -> TowerLayers:
        """Make all layers but the last ones, `without` in number, which a checkpoint may have unused."""

        def build() -> TowerLayer:
            size, heads, norms = self.hidden_size, self.num_attention_heads, (self.norm(), self.norm())
            return TowerLayer(size, heads, self.mlp(), norms, names, bias=bias, causal=causal)

        return TowerLayers(self.num_hidden_layers - without, build, without)

    def norm(self) -> Norm:
        return LayerNorm(self.hidden_size, self.layer_norm_eps)

    def mlp(self) -> MLP:
        sizes, names = (self.hidden_size, self.intermediate_size), ("fc1", "fc2")
        return MLP(*sizes, WHOLE, activation=self.hidden_act, names=names, bias=True)


class VitFields(LayerFields, frozen=True, kw_only=True):
    """The fields of a tower. Those that a config leaves out have the values of transformers' SigLIP."""

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_attention_heads: Size = 12
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: Eps = 1e-6
    image_size: Size = 224
    num_patches: Size | None = None
    """The entries of a square table of positions, where pictures have any shape."""
    patch_size: Size = 16
    num_channels: Literal[3] = 3

    has_class_token: bool = False
    """Whether a learned row comes ahead of the patches."""

    @property
    def rows(self) -> int:
        """The rows that a picture has, or may have if pictures have any shape."""
        return self.num_patches or (self.image_size // self.patch_size) ** 2 + self.has_class_token


_USUAL: Mapping[str, Mapping[str, object]] = {
    "clip_vision_model": {
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "has_class_token": True,
    },
    "siglip_vision_model": {},
}
"""The fields that configs leave out, where they differ from SigLIP's, by the tower's model_type."""


def read_vit(config: Mapping[str, Any], usual: Mapping[str, object] | None = None) -> VitFields:
    """Read the fields of a vision_config; `config` is config.json, whole. `usual` has the fields that it
    leaves out, if these do not depend on its model_type."""
    tower = config.get("vision_config") or {}
    kind = str(tower.get("model_type"))
    if usual is None and kind not in _USUAL:
        known = " and ".join(_USUAL)
        raise ConfigError(
            f"config.json: the tower is of the model_type {kind!r}, and only {known} are served"
        )
    usual = _USUAL[kind] if usual is None else usual
    return read_tower_fields(tower, VitFields, usual, "vision_config in config.json")


class VisionTransformer(nn.Module):
    """Pictures of one size -> the rows of all of them [N * rows, hidden_size], behind the last layer."""

    ignored = ("embeddings.position_ids",)  # constants that old checkpoints carry

    def __init__(
        self,
        fields: VitFields,
        pictures: PictureSettings,
        *,
        without: int = 0,
        names: TowerNames = NAMES,
        bias: bool = True,
    ) -> None:
        """`without`: the last layers that are left out. `bias`: as in `TowerLayer`."""
        super().__init__()
        size, with_class = fields.hidden_size, fields.has_class_token
        self.rows = fields.rows
        self.class_token = Learned(size) if with_class else None
        self.patches = PatchEmbedding(size, fields.patch_size, pictures, bias=not with_class)
        self.positions = Learned(fields.rows, size, name="weight")
        self.first_norm = fields.norm() if with_class else None
        self.layers = fields.layers(without=without, names=names, bias=bias)

    def pull(self, weights: Weights) -> None:
        embeddings = weights / "embeddings"
        if self.class_token is not None:
            load(self.class_token, embeddings / "class_embedding")
        if self.first_norm is not None:
            load(self.first_norm, weights / "pre_layrnorm")
        load(self.patches, embeddings / "patch_embedding")
        load(self.positions, embeddings / "position_embedding")
        load(self.layers, weights / "encoder.layers")

    def forward(self, items: Sequence[TowerInput]) -> InLayers[tuple[Tensor | None, Tensor]]:
        """The stream, and what is still to be added to it, ahead of it, as `enter` takes them."""
        hidden = self.patches(items).unflatten(0, (len(items), -1))  # [N, patches, size]
        if self.class_token is not None:
            first = self.class_token.weight.expand(len(items), 1, -1)
            hidden = torch.cat([first, hidden], dim=1)
        stream = (hidden + self.positions.weight).flatten(0, 1)
        if self.first_norm is not None:
            stream = self.first_norm(stream)
        return (yield from self.layers(segments([self.rows] * len(items), stream.device), stream))


class ShapedTransformer(VisionTransformer):
    """The same for pictures of any shape, to each of which the table of positions is fitted."""

    def __init__(self, fields: VitFields, pictures: PictureSettings) -> None:
        super().__init__(fields, pictures)
        self.patches = PixelPatches(fields.hidden_size, fields.patch_size, pictures, bias=True)

    def forward(self, items: Sequence[TowerInput]) -> InLayers[tuple[Tensor | None, Tensor]]:
        table = self.positions.weight
        positions = torch.cat([resized_table(table, item.grid[1:], "bilinear") for item in items])
        stream = self.patches(items) + positions
        step = segments([prod(item.grid) for item in items], stream.device)
        return (yield from self.layers(step, stream))
