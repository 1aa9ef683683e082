"""DeepSeek-OCR: SAM's tower, then a second one that reads its features, for a whole page and its tiles. The
second tower of version 1 is CLIP's, and that of version 2 a decoder with a learned query for each row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any, ClassVar

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, Eps, Size
from models.context import context
from models.layers.linear import Linear
from models.layers.mlp import GATE_AND_UP, GatedMLP
from models.layers.norm import RMSNorm, enter
from models.layers.rotary import Rotary, read_rope
from models.ops.attention_inputs import HeadPrep
from models.towers.blocks import WHOLE, Learned, TowerLayer, TowerLayers, TowerNames, segments
from models.towers.documents.sam import Halving, SamFields, SamVision, as_published
from models.towers.grids import resized_table
from models.towers.tower import InLayers, TowerInput, TowerSetup, read_tower_fields
from models.towers.vit import NAMES, VitFields

_PUBLISHED = {
    "model.vision_tower.sam_encoder": "model.sam_model",
    "model.vision_tower.query_768_resolution": "model.qwen2_model.query_768",
    "model.vision_tower.query_1024_resolution": "model.qwen2_model.query_1024",
    "model.multi_modal_projector": "model.projector.layers",
    "model.view_separator": "model.view_seperator",
}
"""The names that DeepSeek gave to parts, by those of transformers."""
_QUERIES = {"query_768_resolution": 144, "query_1024_resolution": 256}
"""The learned queries for views of 768 and of 1024 pixels to a side."""


class _DocumentTower(nn.Module, ABC):
    """The tower that both versions share."""

    levels = 0
    passes = 2  # with the tiles, and with the whole page
    encoder_name: ClassVar[str]
    """The published name of the second tower."""

    def __init__(self, setup: TowerSetup, sam: SamFields, encoder: nn.Module, width: int) -> None:
        """`width`: the features of each row that is projected to the text's width."""
        super().__init__()
        self.patch = sam.patch_size
        self.sam = SamVision(sam, setup.pictures)
        sizes = sam.output_channels, *sam.downsample_channels
        self.halving = Halving(sizes, ("proj.conv1", "proj.conv2"))
        self.encoder = encoder
        self.projector = Linear(width, setup.hidden_size, bias=True)
        self.separator = Learned(setup.hidden_size)
        self.beside: dict[str, Learned] = {}
        """The tensors that only this version has, by their names."""

    def pull(self, weights: Weights) -> None:
        if "model.view_seperator" in weights:
            weights = weights.renamed({**_PUBLISHED, "model.vision_tower.vision_encoder": self.encoder_name})
        sam = as_published(weights / "model.vision_tower.sam_encoder")
        load(self.sam, sam)
        load(self.halving, sam)
        load(self.encoder, weights / "model.vision_tower.vision_encoder")
        load(self.projector, weights / "model.multi_modal_projector")
        load(self.separator, weights / "model.view_separator")
        for name, part in self.beside.items():
            load(part, weights / name)

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        views = [self._views(item) for item in items]
        flat = [view for each in views for view in each]
        made: dict[int, Tensor] = {}
        for side in {view.grid[1] for view in flat}:
            same = [number for number, view in enumerate(flat) if view.grid[1] == side]
            fed = self.halving((yield from self.sam([flat[number] for number in same])))
            features = yield from self.features(fed)
            rows = self.projector(features.flatten(0, 1)).view(*features.shape[:2], -1)
            made |= zip(same, rows, strict=True)
        rows = iter(made[number] for number in range(len(flat)))
        of_items = [[next(rows) for _ in each] for each in views]
        return [self.joined(each, item) for each, item in zip(of_items, items, strict=True)]

    def _views(self, item: TowerInput) -> list[TowerInput]:
        """The tiles of a page, if it has some, and the whole page, whose pixels lie behind theirs."""
        rows, height, width = item.grid
        side = height // rows * self.patch
        sides, left = [side] * (rows * rows * width // height), item.pixels.numel() // 3
        if (rest := left - len(sides) * side**2) > 0:
            sides.append(isqrt(rest))
        parts = item.pixels.flatten().split([3 * side**2 for side in sides])
        return [
            replace(item, pixels=part.view(side, side, 3), grid=(1, side // self.patch, side // self.patch))
            for part, side in zip(parts, sides, strict=True)
        ]

    @abstractmethod
    def features(self, fed: Tensor) -> InLayers[Tensor]:
        """What SAM gives of views of one size [N, cells, F] -> what is projected [N, cells, width]."""

    @abstractmethod
    def joined(self, views: Sequence[Tensor], item: TowerInput) -> Tensor:
        """The rows of an item, of those of its views [cells, H], of which the last is the whole page."""


_TRANSLATED = {"heads": "num_attention_heads", "layers": "num_hidden_layers", "width": "hidden_size"}
"""The names of transformers for fields of version 1."""
_CLIP: Mapping[str, object] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "patch_size": 14,
    "has_class_token": True,
}


def _described(usual: Mapping[str, object], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a tower, with what config.json gives of them."""
    return {**usual, **{_TRANSLATED.get(name, name): value for name, value in given.items()}}


class FedTransformer(nn.Module):
    """CLIP's layers, which read features [N, cells, size] in the place of embedded patches."""

    ignored = ("embeddings.patch_embedding", "embeddings.position_ids")  # published, and never used

    def __init__(self, fields: VitFields) -> None:
        super().__init__()
        self.class_token = Learned(fields.hidden_size)
        self.positions = Learned(fields.rows, fields.hidden_size, name="weight")
        self.first_norm = fields.norm()
        self.layers = fields.layers(names=replace(NAMES, qkv=("self_attn.qkv_proj",)))

    def pull(self, weights: Weights) -> None:
        load(self.class_token, weights / "embeddings.class_embedding")
        load(self.positions, weights / "embeddings.position_embedding")
        load(self.first_norm, weights / "pre_layrnorm")
        load(self.layers, weights / "transformer.layers")

    def forward(self, fed: Tensor) -> InLayers[Tensor]:
        count, cells, _ = fed.shape
        table, side = self.positions.weight, isqrt(cells)
        positions = torch.cat([table[:1], resized_table(table[1:], (side, side), "bicubic")])
        first = self.class_token.weight.expand(count, 1, -1)
        stream = self.first_norm((torch.cat([first, fed], dim=1) + positions).flatten(0, 1))
        made = yield from self.layers(segments([cells + 1] * count, stream.device), stream)
        return enter(None, *made)[1].unflatten(0, (count, -1))[:, 1:]


class DeepseekOcrTower(_DocumentTower):
    """Version 1: CLIP's rows beside SAM's; those of the page, and those of all tiles, end with one each."""

    encoder_name = "model.vision_model"

    def __init__(self, setup: TowerSetup) -> None:
        vision = setup.config["vision_config"]
        given = vision.get("width") or {}
        usual = {"downsample_channels": (512, 1024), "image_size": vision.get("image_size")}
        sam = read_tower_fields(_described(usual, given.get("sam_vit_b") or {}), SamFields)
        of_clip = _described(_CLIP, given.get("clip-l-14-224") or {})
        clip = read_tower_fields({"intermediate_size": 4 * of_clip["hidden_size"], **of_clip}, VitFields)
        size = clip.hidden_size
        if sam.downsample_channels[1] != size:
            raise ConfigError(
                f"config.json: SAM gives {sam.downsample_channels[1]} features, and CLIP takes {size}"
            )
        super().__init__(setup, sam, FedTransformer(clip), 2 * size)
        self.newline = Learned(setup.hidden_size)
        self.beside = {"model.image_newline": self.newline}

    def features(self, fed: Tensor) -> InLayers[Tensor]:
        return torch.cat([(yield from self.encoder(fed)), fed], dim=-1)

    def joined(self, views: Sequence[Tensor], item: TowerInput) -> Tensor:
        *tiles, page = views
        lines = [self._lines([page], 1), self.separator.weight.unsqueeze(0)]
        return torch.cat([self._lines(tiles, item.grid[0]), *lines] if tiles else lines)

    def _lines(self, tiles: Sequence[Tensor], down: int) -> Tensor:
        """The rows of tiles that lie side by side, `down` of them below each other, line by line."""
        side = isqrt(len(tiles[0]))
        grid = torch.stack([*tiles]).view(down, -1, side, side, tiles[0].shape[-1]).transpose(1, 2)
        lines = grid.reshape(down * side, -1, grid.shape[-1])
        return torch.cat([lines, self.newline.weight.expand(len(lines), 1, -1)], dim=1).flatten(0, 1)


class _EncoderFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the second tower; config.json says little of the published one, which these are of."""

    hidden_size: Size = 896
    intermediate_size: Size = 4864
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 14
    num_key_value_heads: Size = 2
    hidden_act: str = "silu"
    rms_norm_eps: Eps = 1e-6


_ROPE: dict[str, Any] = {"max_position_embeddings": 32_768, "rope_theta": 1_000_000.0}
_NAMES = TowerNames(
    qkv=NAMES.qkv, out="self_attn.o_proj", norms=("input_layernorm", "post_attention_layernorm")
)


class _QueryAttention(nn.Module):
    """Attention in which the first half of the rows see each other, and later ones those and the ones before
    them. Views, which have the same size, take turns."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, prep: HeadPrep) -> Tensor:
        q, k, v = (x.reshape(len(x), -1, self.dim) for x in (q, k, v))
        q, k = ops.rotate(q, prep.cos_sin), ops.rotate(k, prep.cos_sin)
        length = context().query_lens_host[0]
        places = torch.arange(length, device=q.device)
        seen = places <= places.clamp(min=length // 2 - 1).unsqueeze(1)
        read: list[Tensor] = []
        for parts in zip(*(x.split(length) for x in (q, k, v)), strict=True):
            heads = (part.transpose(0, 1).unsqueeze(0) for part in parts)
            made = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
            read.append(made[0].transpose(0, 1).flatten(1))
        return torch.cat(read)


class QueryEncoder(nn.Module):
    """Qwen2's layers for features and as many queries [N, 2 * cells, size] -> the rows of the queries."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        fields = read_tower_fields(config, _EncoderFields)
        size, heads = fields.hidden_size, fields.num_attention_heads
        dim = size // heads
        self.rotary = Rotary(read_rope(config, dim, 2 * max(_QUERIES.values())))

        def build() -> TowerLayer:
            inner, act, eps = fields.intermediate_size, fields.hidden_act, fields.rms_norm_eps
            mlp = GatedMLP(size, inner, WHOLE, activation=act, sources=GATE_AND_UP)
            norms, attention = (RMSNorm(size, eps), RMSNorm(size, eps)), _QueryAttention(dim)
            keys = fields.num_key_value_heads
            return TowerLayer(
                *(size, heads, mlp, norms, _NAMES), key_heads=keys, out_bias=False, attention=attention
            )

        self.layers = TowerLayers(fields.num_hidden_layers, build)
        self.norm = RMSNorm(size, fields.rms_norm_eps)
        self.size = size

    def forward(self, rows: Tensor) -> InLayers[Tensor]:
        count, length, _ = rows.shape
        step = segments([length] * count, rows.device)
        made = yield from self.layers(step, rows.flatten(0, 1), self.rotary(step.positions))
        normed, _ = enter(self.norm, *made)
        return normed.unflatten(0, (count, -1))[:, length // 2 :]


class DeepseekOcr2Tower(_DocumentTower):
    """Version 2: the rows of queries, those of tiles ahead of those of the page."""

    encoder_name = "model.qwen2_model.model.model"

    def __init__(self, setup: TowerSetup) -> None:
        vision = setup.config["vision_config"]
        encoder = QueryEncoder(vision.get("encoder_config") or _ROPE)
        sam = read_tower_fields(vision.get("sam_config") or {}, SamFields)
        super().__init__(setup, sam, encoder, encoder.size)
        self.beside = {
            f"model.vision_tower.{name}": Learned(count, encoder.size, name="weight")
            for name, count in _QUERIES.items()
        }
        self.queries = nn.ModuleList(self.beside.values())

    def features(self, fed: Tensor) -> InLayers[Tensor]:
        (queries,) = (each.weight for each in self.beside.values() if len(each.weight) == fed.shape[1])
        return self.encoder(torch.cat([fed, queries.expand(len(fed), -1, -1)], dim=1))

    def joined(self, views: Sequence[Tensor], item: TowerInput) -> Tensor:
        return torch.cat([*views, self.separator.weight.unsqueeze(0)])
