"""LLaVA: what one of the last layers of a CLIP, SigLIP or Pixtral tower gives, as wide as the text. Mistral 3
has Pixtral's tower, of whose rows squares are merged. LLaVA-NeXT and OneVision have tiles, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, ClassVar, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import Eps, Size
from models.layers.linear import Linear
from models.layers.mlp import GATE_AND_UP, GatedMLP
from models.layers.norm import RMSNorm, enter
from models.media.files import PictureSettings
from models.media.tiling.llava_next import most_tiles, shrunk
from models.towers.blocks import (
    WHOLE,
    Learned,
    PatchEmbedding,
    Projector,
    TowerLayer,
    TowerLayers,
    TowerNames,
    merge_squares,
    segments,
)
from models.towers.tower import InLayers, TowerInput, TowerSetup, cut_tiles, read_tower_fields, unused_layers
from models.towers.vit import PROJECTORS, TOWERS, VisionTransformer, read_vit

_PIXTRAL_EPS = 1e-5
_PIXTRAL_NAMES = TowerNames(
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    norms=("attention_norm", "ffn_norm"),
    mlp="feed_forward",
)


class _PixtralRope(msgspec.Struct, frozen=True):
    rope_theta: Annotated[float, msgspec.Meta(gt=0)] = 10_000.0


class PixtralFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a vision_config."""

    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 16
    patch_size: Size = 16
    hidden_act: str = "gelu"
    rope_theta: Annotated[float, msgspec.Meta(gt=0)] | None = None
    rope_parameters: _PixtralRope = _PixtralRope()


class PixtralVision(nn.Module):
    """Pictures of any shapes -> the rows of all of them [P, hidden_size], behind the last layer."""

    def __init__(self, fields: PixtralFields, pictures: PictureSettings, *, without: int = 0) -> None:
        """`without`: the last layers that are left out."""
        super().__init__()
        size, heads = fields.hidden_size, fields.num_attention_heads
        self.pairs = size // heads // 2
        self.theta = fields.rope_theta or fields.rope_parameters.rope_theta
        self.patches = PatchEmbedding(size, fields.patch_size, pictures, bias=False)
        self.first_norm = RMSNorm(size, _PIXTRAL_EPS)

        def build() -> TowerLayer:
            inner, act = fields.intermediate_size, fields.hidden_act
            mlp = GatedMLP(size, inner, WHOLE, activation=act, sources=GATE_AND_UP)
            norms = RMSNorm(size, _PIXTRAL_EPS), RMSNorm(size, _PIXTRAL_EPS)
            return TowerLayer(size, heads, mlp, norms, _PIXTRAL_NAMES, bias=False, out_bias=False)

        self.layers = TowerLayers(fields.num_hidden_layers - without, build, without)

    def pull(self, weights: Weights) -> None:
        load(self.patches, weights / "patch_conv")
        load(self.first_norm, weights / "ln_pre")
        load(self.layers, weights / "transformer.layers")

    def forward(self, items: Sequence[TowerInput]) -> InLayers[tuple[Tensor | None, Tensor]]:
        """The stream, and what is still to be added to it, ahead of it, as `enter` takes them."""
        stream = self.first_norm(self.patches(items))
        cos_sin = torch.cat([self._angles(*item.grid, stream.device) for item in items])
        step = segments([prod(item.grid) for item in items], stream.device)
        return (yield from self.layers(step, stream, cos_sin))

    def _angles(self, frames: int, rows: int, columns: int, device: torch.device) -> Tensor:
        """The rotations of a picture's patches: even pairs turn by the row, odd ones by the column."""
        powers = torch.arange(0, 2 * self.pairs, 2, dtype=torch.float32, device=device) / (2 * self.pairs)
        frequencies = 1.0 / self.theta**powers
        down = torch.arange(rows, device=device).unsqueeze(1) * frequencies[0::2]
        across = torch.arange(columns, device=device).unsqueeze(1) * frequencies[1::2]
        turned = torch.cat([down.repeat_interleave(columns, 0), across.repeat(frames * rows, 1)], dim=1)
        return torch.cat([turned.cos(), turned.sin()], dim=1)


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
    usual_tower: ClassVar[str] = ""

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        config = setup.config
        fields = read_tower_fields(config, _Fields, self.usual)
        layer, pictures = fields.vision_feature_layer, setup.pictures
        self.vision: PixtralVision | VisionTransformer
        if (config["vision_config"].get("model_type") or self.usual_tower) == "pixtral":
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
        self.size, act = size, fields.projector_hidden_act
        self.projector = Projector(
            size, setup.hidden_size, activation=act, bias=fields.multimodal_projector_bias
        )

    def pull(self, weights: Weights) -> None:
        tower = weights.first(*TOWERS)
        tower.ignore(*_UNUSED)
        load(self.vision, tower)
        load(self.projector, weights.first(*PROJECTORS))

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        delta, stream = yield from self.vision(items)
        rows = self.projector(stream if delta is None else stream + delta)
        pieces = rows.split([prod(item.grid) + self.others for item in items])
        return [piece[self.first_row :] for piece in pieces]


class _Text(msgspec.Struct, frozen=True):
    rms_norm_eps: Eps = 1e-6


class _Mistral3Fields(msgspec.Struct, frozen=True):
    text_config: _Text
    spatial_merge_size: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2


class Mistral3Tower(LlavaTower):
    usual = {"vision_feature_layer": -1, "multimodal_projector_bias": False}
    usual_tower = "pixtral"

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__(setup)
        fields = read_tower_fields(setup.config, _Mistral3Fields)
        self.merge = fields.spatial_merge_size
        self.norm = RMSNorm(self.size, fields.text_config.rms_norm_eps)
        self.merging = Linear(self.size * self.merge**2, self.size)

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        projector = weights.first(*PROJECTORS)
        load(self.norm, projector / "norm")
        load(self.merging, projector / "patch_merger.merging_layer")

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        normed, _ = enter(self.norm, *(yield from self.vision(items)))
        pieces = zip(normed.split([prod(item.grid) for item in items]), items, strict=True)
        squares = torch.cat([merge_squares(piece, *item.grid[1:], self.merge) for piece, item in pieces])
        by_channel = squares.unflatten(1, (self.merge**2, -1)).transpose(1, 2).flatten(1)
        return list(self.projector(self.merging(by_channel)).split([item.embeddings for item in items]))


class LlavaNextTower(LlavaTower):
    """The rows of a whole picture, then those of its tiles, whose lines end with one more."""

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

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        tiles = cut_tiles(items, self.side, self.patch)
        rows = torch.stack((yield from super().encode(tiles)))  # [tiles, patches, H]
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
    """In frames of a video four patches become one, and one more row stands behind the last frame."""

    usual = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    aspect = "anyres_max_9"

    def _packed(self, rows: Tensor, item: TowerInput) -> Tensor:
        if item.kind != "video":
            return super()._packed(rows, item)
        across = self.side // self.patch
        channels_first = rows.view(-1, across, across, rows.shape[-1]).permute(0, 3, 1, 2)
        half = -(-across // 2)
        pooled = F.interpolate(channels_first, (half, half), mode="bilinear").permute(0, 2, 3, 1)
        return torch.cat([pooled.reshape(-1, rows.shape[-1]), self.newline.weight.view(1, -1)])
