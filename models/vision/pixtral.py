"""Pixtral's tower, whose pictures have any shape."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import Size
from models.context import use_context
from models.layers.mlp import GATE_AND_UP, GatedMLP
from models.layers.norm import RMSNorm
from models.media.files import PictureSettings
from models.vision.blocks import WHOLE, PatchEmbedding, TowerLayer, TowerLayers, TowerNames, segments
from models.vision.tower import TowerInput

_EPS = 1e-5
_NAMES = TowerNames(
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    norms=("attention_norm", "ffn_norm"),
    mlp="feed_forward",
)


class _Rope(msgspec.Struct, frozen=True):
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
    rope_parameters: _Rope = _Rope()


class PixtralVision(nn.Module):
    """Pictures of any shapes -> the rows of all of them [P, hidden_size], behind the last layer."""

    def __init__(self, fields: PixtralFields, pictures: PictureSettings, *, without: int = 0) -> None:
        """`without`: the last layers that are left out."""
        super().__init__()
        size, heads = fields.hidden_size, fields.num_attention_heads
        self.pairs = size // heads // 2
        self.theta = fields.rope_theta or fields.rope_parameters.rope_theta
        self.patches = PatchEmbedding(size, fields.patch_size, pictures, bias=False)
        self.first_norm = RMSNorm(size, _EPS)

        def build() -> TowerLayer:
            inner, act = fields.intermediate_size, fields.hidden_act
            mlp = GatedMLP(size, inner, WHOLE, activation=act, sources=GATE_AND_UP)
            norms = RMSNorm(size, _EPS), RMSNorm(size, _EPS)
            return TowerLayer(size, heads, mlp, norms, _NAMES, bias=False, out_bias=False)

        self.layers = TowerLayers(fields.num_hidden_layers - without, build, without)

    def pull(self, weights: Weights) -> None:
        load(self.patches, weights / "patch_conv")
        load(self.first_norm, weights / "ln_pre")
        load(self.layers, weights / "transformer.layers")

    def forward(self, items: Sequence[TowerInput]) -> tuple[Tensor | None, Tensor]:
        """The stream, and what is still to be added to it, ahead of it, as `enter` takes them."""
        stream = self.first_norm(self.patches(items))
        cos_sin = torch.cat([self._angles(*item.grid, stream.device) for item in items])
        with use_context(segments([prod(item.grid) for item in items], stream.device)):
            return self.layers(stream, cos_sin)

    def _angles(self, frames: int, rows: int, columns: int, device: torch.device) -> Tensor:
        """The rotations of a picture's patches: even pairs turn by the row, odd ones by the column."""
        powers = torch.arange(0, 2 * self.pairs, 2, dtype=torch.float32, device=device) / (2 * self.pairs)
        frequencies = 1.0 / self.theta**powers
        down = torch.arange(rows, device=device).unsqueeze(1) * frequencies[0::2]
        across = torch.arange(columns, device=device).unsqueeze(1) * frequencies[1::2]
        turned = torch.cat([down.repeat_interleave(columns, 0), across.repeat(frames * rows, 1)], dim=1)
        return torch.cat([turned.cos(), turned.sin()], dim=1)
