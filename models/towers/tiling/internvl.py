"""InternVL: a ViT with factors behind attention and MLP, of whose rows squares are merged and projected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, Size
from models.layers.norm import LayerNorm, Norm, RMSNorm
from models.media.files import PictureSettings
from models.media.tiling.internvl import square
from models.towers.blocks import Learned, PatchEmbedding, Projector, TowerNames, merge_squares
from models.towers.tower import InLayers, TowerInput, TowerSetup, cut_tiles, read_tower_fields, unused_layers
from models.towers.vit import VisionTransformer, VitFields

_PUBLISHED = {
    "vision_tower": "vision_model",
    "multi_modal_projector": "mlp1",
    "layer_norm": "0",
    "linear_1": "1",
    "linear_2": "3",
}
"""The names that InternVL's authors gave to parts, by those of transformers, for which others are theirs:"""
_TRANSFORMERS = {
    "class_embedding": "cls_token",
    "patch_embedding": "patch_embeddings.projection",
    "position_embedding": "position_embeddings",
    "encoder.layers": "encoder.layer",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
    "attn.proj": "attention.projection_layer",
}
_NAMES = TowerNames(qkv=("attn.qkv",), out="attn.proj", norms=("norm1", "norm2"), scales=("ls1", "ls2"))


class InternFields(VitFields, frozen=True, kw_only=True):
    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 16
    image_size: Size = 448
    patch_size: Size = 14
    hidden_act: str = "gelu"
    has_class_token: bool = True
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    attention_bias: bool = False
    use_qk_norm: bool = False
    use_mean_pooling: bool = True
    use_absolute_position_embeddings: bool = True

    def norm(self) -> Norm:
        kind = LayerNorm if self.norm_type == "layer_norm" else RMSNorm
        return kind(self.hidden_size, self.layer_norm_eps)


class InternVision(VisionTransformer):
    """Tiles as CLIP's tower takes them, without its norm ahead of the layers."""

    ignored = ("embeddings.mask_token",)  # for training alone

    def __init__(
        self, fields: InternFields, pictures: PictureSettings, names: TowerNames, *, without: int
    ) -> None:
        super().__init__(fields, pictures, without=without, names=names, bias=fields.attention_bias)
        if fields.use_qk_norm or not (fields.use_mean_pooling and fields.use_absolute_position_embeddings):
            raise ConfigError(
                "vision_config: towers with use_qk_norm, or without use_mean_pooling or "
                "use_absolute_position_embeddings, are not served"
            )
        size = fields.hidden_size
        self.class_token, self.positions = Learned(1, 1, size), Learned(1, fields.rows, size)
        self.patches = PatchEmbedding(size, fields.patch_size, pictures, bias=True)
        self.first_norm = None


class _Fields(msgspec.Struct, frozen=True):
    vision_config: InternFields
    downsample_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    vision_feature_layer: int = -1
    vision_feature_select_strategy: Literal["default"] = "default"
    ps_version: Literal["v2"] = "v2"
    """The order in which the original code merges squares."""
    projector_hidden_act: str = "gelu"


class InternVLTower(nn.Module):
    levels = 0
    names: ClassVar[Mapping[str, str]] = _TRANSFORMERS
    """The names of parts in the checkpoint."""
    layer: ClassVar[TowerNames] = replace(_NAMES, qkv=tuple(f"attention.{name}_proj" for name in "qkv"))

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        fields = read_tower_fields(self.translated(setup.config), _Fields)
        self.tower, self.merge = fields.vision_config, int(1 / fields.downsample_ratio)
        self.across = self.tower.image_size // self.tower.patch_size
        without = unused_layers(fields.vision_feature_layer, self.tower.num_hidden_layers)
        self.vision = InternVision(self.tower, setup.pictures, self.layer, without=without)
        if self.across % self.merge:
            raise ConfigError(f"config.json: downsample_ratio does not divide {self.across} patches")
        merged, act = self.tower.hidden_size * self.merge**2, fields.projector_hidden_act
        self.norm = LayerNorm(merged, 1e-5)
        self.projector = Projector(merged, setup.hidden_size, activation=act, bias=True)

    def translated(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give config.json the names of transformers, and squares one side."""
        tower = config["vision_config"]
        sides = {name: square(tower[name]) for name in ("image_size", "patch_size") if tower.get(name)}
        return {**config, "vision_config": {**tower, **sides}}

    def pull(self, weights: Weights) -> None:
        weights = weights.renamed(self.names)
        load(self.vision, weights.first("model.vision_tower", "vision_tower"))
        projector = weights.first("model.multi_modal_projector", "multi_modal_projector")
        load(self.norm, projector / "layer_norm")
        load(self.projector, projector)

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        across, tower = self.across, self.tower
        delta, stream = yield from self.vision(cut_tiles(items, tower.image_size, tower.patch_size))
        rows = stream if delta is None else stream + delta
        patches = rows.unflatten(0, (-1, across**2 + 1))[:, 1:].flatten(0, 1)
        squares = merge_squares(patches, across, across, self.merge)
        return list(self.projector(self.norm(squares)).split([item.embeddings for item in items]))


class InternVLChatTower(InternVLTower):
    """The tower under the names of InternVL's authors."""

    names, layer = _PUBLISHED, _NAMES

    def translated(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        whole = super().translated(config)
        tower = whole["vision_config"]
        fields = {
            **tower,
            "attention_bias": tower.get("qkv_bias", False),
            "use_qk_norm": tower.get("qk_normalization", True),
            "use_mean_pooling": True,
        }
        return {**whole, "vision_config": fields, "vision_feature_layer": config.get("select_layer", -1)}
