"""InternVL: a ViT with factors behind attention and MLP, of whose rows squares are merged and projected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, Eps, Size
from models.context import use_context
from models.layers.mlp import MLP
from models.layers.norm import LayerNorm, Norm, RMSNorm
from models.media.files import PictureSettings
from models.media.tiling.internvl import square
from models.vision.blocks import WHOLE, Learned, PatchEmbedding, TowerLayer, TowerLayers, TowerNames, segments
from models.vision.projector import Projector, merge_squares
from models.vision.tower import TowerInput, TowerSetup
from models.vision.tower_inputs import cut_tiles, read_tower_fields, unused_layers

_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_PUBLISHED = {
    "vision_tower": "vision_model",
    "cls_token": "class_embedding",
    "patch_embeddings.projection": "patch_embedding",
    "position_embeddings": "position_embedding",
    "encoder.layer": "encoder.layers",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_1": "ls1",
    "lambda_2": "ls2",
    "attention.projection_layer": "attn.proj",
    "multi_modal_projector": "mlp1",
    "layer_norm": "0",
    "linear_1": "1",
    "linear_2": "3",
}
"""The names that InternVL's authors gave to parts, by those of transformers."""


class InternFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a vision_config."""

    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 16
    image_size: Size | list[Size] = 448
    patch_size: Size | list[Size] = 14
    hidden_act: str = "gelu"
    layer_norm_eps: Eps = 1e-6
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    attention_bias: bool = False
    use_qk_norm: bool = False
    use_mean_pooling: bool = True
    use_absolute_position_embeddings: bool = True

    def norm(self) -> Norm:
        kind = LayerNorm if self.norm_type == "layer_norm" else RMSNorm
        return kind(self.hidden_size, self.layer_norm_eps)


class InternVision(nn.Module):
    """Tiles of one size -> the rows of all of them [N * rows, hidden_size], behind the last layer."""

    ignored = ("embeddings.mask_token",)  # for training alone

    def __init__(
        self, fields: InternFields, pictures: PictureSettings, qkv: tuple[str, ...], *, without: int
    ) -> None:
        """`qkv`: the names of queries, keys and values, as in `TowerNames`; `without` as for other towers."""
        super().__init__()
        if fields.use_qk_norm or not (fields.use_mean_pooling and fields.use_absolute_position_embeddings):
            raise ConfigError(
                "vision_config: towers with use_qk_norm, or without use_mean_pooling or "
                "use_absolute_position_embeddings, are not served"
            )
        size, patch = fields.hidden_size, square(fields.patch_size)
        self.side, self.patch = square(fields.image_size), patch
        self.across = self.side // patch
        self.class_token = Learned(1, 1, size)
        self.patches = PatchEmbedding(size, patch, pictures, bias=True)
        self.positions = Learned(1, self.across**2 + 1, size)

        names = TowerNames(
            qkv=qkv,
            out="attention.projection_layer",
            norms=("layernorm_before", "layernorm_after"),
            scales=("lambda_1", "lambda_2"),
        )

        def build() -> TowerLayer:
            mlp = MLP(
                *(size, fields.intermediate_size, WHOLE),
                activation=fields.hidden_act,
                names=("fc1", "fc2"),
                bias=True,
            )
            norms = fields.norm(), fields.norm()
            return TowerLayer(size, fields.num_attention_heads, mlp, norms, names, bias=fields.attention_bias)

        self.layers = TowerLayers(fields.num_hidden_layers - without, build, without)

    def pull(self, weights: Weights) -> None:
        weights.ignore(*self.ignored)
        embeddings = weights / "embeddings"
        load(self.class_token, embeddings / "cls_token")
        load(self.patches, embeddings / "patch_embeddings.projection")
        load(self.positions, embeddings / "position_embeddings")
        load(self.layers, weights / "encoder.layer")

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        tiles = cut_tiles(items, self.side, self.patch)
        patches = self.patches(tiles).unflatten(0, (len(tiles), -1))  # [N, patches, size]
        first = self.class_token.weight.expand(len(tiles), 1, -1)
        stream = (torch.cat([first, patches], dim=1) + self.positions.weight).flatten(0, 1)
        with use_context(segments([self.across**2 + 1] * len(tiles), stream.device)):
            delta, stream = self.layers(stream)
        return stream if delta is None else stream + delta


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
    qkv: ClassVar[tuple[str, ...]] = _QKV

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        fields = read_tower_fields(self.translated(setup.config), _Fields)
        tower, self.merge = fields.vision_config, int(1 / fields.downsample_ratio)
        without = unused_layers(fields.vision_feature_layer, tower.num_hidden_layers)
        self.vision = InternVision(tower, setup.pictures, self.qkv, without=without)
        if self.vision.across % self.merge:
            raise ConfigError(f"config.json: downsample_ratio does not divide {self.vision.across} patches")
        merged, act = tower.hidden_size * self.merge**2, fields.projector_hidden_act
        self.norm = LayerNorm(merged, 1e-5)
        self.projector = Projector(merged, setup.hidden_size, activation=act, bias=True)

    def translated(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give config.json the names of transformers."""
        return config

    def pull(self, weights: Weights) -> None:
        load(self.vision, weights.first("model.vision_tower", "vision_tower"))
        projector = weights.first("model.multi_modal_projector", "multi_modal_projector")
        load(self.norm, projector / "layer_norm")
        load(self.projector, projector)

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        across = self.vision.across
        patches = self.vision(items).unflatten(0, (-1, across**2 + 1))[:, 1:].flatten(0, 1)
        squares = merge_squares(patches, across, across, self.merge)
        return list(self.projector(self.norm(squares)).split([item.embeddings for item in items]))


class InternVLChatTower(InternVLTower):
    """The tower under the names of InternVL's authors."""

    qkv = ("attn.qkv",)

    def pull(self, weights: Weights) -> None:
        super().pull(weights.renamed(_PUBLISHED))

    def translated(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        tower = config["vision_config"]
        fields = {
            **tower,
            "attention_bias": tower.get("qkv_bias", False),
            "use_qk_norm": tower.get("qk_normalization", True),
            "use_mean_pooling": True,
        }
        return {**config, "vision_config": fields, "vision_feature_layer": config.get("select_layer", -1)}
