"""SAM's tower, as models that read documents have it, and GOT-OCR 2, which projects what it gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isqrt

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import Eps, Size
from models.context import context, use_context
from models.layers.linear import Linear, frozen
from models.layers.mlp import MLP
from models.layers.norm import LayerNorm, enter
from models.media.files import PictureSettings
from models.ops.attention_inputs import HeadPrep
from models.towers.blocks import WHOLE, Learned, PatchEmbedding, TowerLayer, TowerNames, segments
from models.towers.grids import resized_table
from models.towers.tower import InLayers, TowerInput, TowerSetup, cut_tiles, read_tower_fields

_NAMES = TowerNames(
    qkv=("attn.qkv",), attention="attn", out="attn.proj", norms=("layer_norm1", "layer_norm2")
)
_PUBLISHED = {
    "patch_embed.projection": "patch_embed.proj",
    "layers": "blocks",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "neck.conv1": "neck.0",
    "neck.layer_norm1": "neck.1",
    "neck.conv2": "neck.2",
    "neck.layer_norm2": "neck.3",
    "proj.conv1": "net_2",
    "proj.conv2": "net_3",
}
"""The names that SAM's authors, and those of DeepSeek-OCR, gave to parts, by those of transformers."""
_NECK_EPS = 1e-6
_QUERIES = 512
"""The most rows whose scores, with what positions add to them, are held at a time."""


class SamFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the tower, with the values of transformers where config.json leaves some out."""

    hidden_size: Size = 768
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    image_size: Size = 1024
    patch_size: Size = 16
    hidden_act: str = "gelu"
    layer_norm_eps: Eps = 1e-6
    window_size: Size = 14
    global_attn_indexes: tuple[int, ...] = (2, 5, 8, 11)
    """The layers without windows."""
    mlp_dim: Size | None = None
    """The inner features of the MLP; None means four times the width."""
    output_channels: Size = 256
    downsample_channels: tuple[Size, Size] = (512, 896)
    """The features behind each of two convolutions that follow the neck."""

    @property
    def across(self) -> int:
        """The patches in a row of a picture of the size of training."""
        return self.image_size // self.patch_size


class Convolution(nn.Module):
    """A square convolution without bias: [N, rows, columns, inputs] -> [N, rows', columns', outputs]."""

    weight: nn.Parameter

    def __init__(self, inputs: int, outputs: int, side: int, *, stride: int = 1) -> None:
        super().__init__()
        self.inputs, self.outputs, self.side, self.stride = inputs, outputs, side, stride

    def pull(self, weights: Weights) -> None:
        matrix = weights.take("weight", [self.outputs, self.inputs, self.side, self.side])
        self.weight = frozen(ops.pack(matrix.flatten(1), plain=True))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = ((length - 1) // self.stride + 1 for length in x.shape[1:3])
        cells = F.unfold(x.permute(0, 3, 1, 2), self.side, padding=self.side // 2, stride=self.stride)
        made = ops.linear(cells.transpose(1, 2).flatten(0, 1), self.weight, None)
        return made.view(len(x), rows, columns, self.outputs)


class Halving(nn.ModuleList):
    """Two convolutions, each of which halves the sides of a grid: 16 patches become one row of features."""

    def __init__(self, sizes: Sequence[int], names: tuple[str, str]) -> None:
        """`sizes`: the features ahead of the first one, and behind each; `names`: theirs."""
        super().__init__(Convolution(*each, 3, stride=2) for each in pairwise(sizes))
        self.names = names

    def pull(self, weights: Weights) -> None:
        for part, name in zip(self, self.names, strict=True):
            load(part, weights / name)

    def forward(self, x: Tensor) -> Tensor:
        """Grids [N, rows, columns, F] -> the rows of features [N, cells, F']."""
        for part in self:
            x = part(x)
        return x.flatten(1, 2)


class GridAttention(nn.Module):
    """Attention within the windows of square pictures, or within all of them. Scores gain what the query
    makes of the distance in rows, and of that in columns. Pictures take turns, so that each has the same bits
    alone and beside others."""

    by_row: nn.Parameter  # [2 * side - 1, dim], by distance
    by_column: nn.Parameter
    padding: tuple[Tensor, ...]  # the query, key and value [heads * dim] of cells outside of the picture

    def __init__(self, heads: int, dim: int, side: int, *, windowed: bool) -> None:
        """`side`: that of windows, or that of pictures in training, to which the tables belong."""
        super().__init__()
        self.heads, self.dim, self.side, self.windowed = heads, dim, side, windowed

    def pull(self, weights: Weights) -> None:
        shape = 2 * self.side - 1, self.dim
        self.by_row, self.by_column = (frozen(weights.take(f"rel_pos_{axis}", shape)) for axis in "hw")
        self.padding = weights.take("qkv.bias", [3 * self.heads * self.dim]).chunk(3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, prep: HeadPrep) -> Tensor:
        """q, k, v [T, heads * dim] -> the same, of all pictures, which have the same size."""
        cells = context().query_lens_host[0]
        pictures = zip(*(part.split(cells) for part in (q, k, v)), strict=True)
        return torch.cat([self._one(parts, isqrt(cells)) for parts in pictures])

    def _one(self, parts: Sequence[Tensor], side: int) -> Tensor:
        """The heads of one picture of side x side cells."""
        window = self.side if self.windowed else side
        count = -(-side // window)
        pairs = zip(parts, self.padding, strict=True)
        q, k, v = (self._cut(part, padding, side, window) for part, padding in pairs)
        heads = torch.cat([*self._read(q, k, v, window)], dim=2)  # [windows, heads, cells, dim]
        whole = heads.view(count, count, self.heads, window, window, self.dim).permute(0, 3, 1, 4, 2, 5)
        return whole.reshape(count * window, count * window, -1)[:side, :side].flatten(0, 1)

    def _cut(self, x: Tensor, padding: Tensor, side: int, window: int) -> Tensor:
        """Cut the cells of a picture [side**2, heads * dim] into windows [windows, heads, cells, dim]."""
        count = -(-side // window)
        whole = padding.expand(count * window, count * window, -1).clone()
        whole[:side, :side] = x.view(side, side, -1)
        cells = whole.view(count, window, count, window, self.heads, self.dim)
        return cells.permute(0, 2, 4, 1, 3, 5).reshape(count**2, self.heads, window**2, self.dim)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Iterator[Tensor]:
        """What the queries of some rows of windows at a time read."""
        rows, columns = (_distances(table, window) for table in (self.by_row, self.by_column))
        grid, at_once = q.unflatten(2, (window, window)), max(1, _QUERIES // window)
        for start in range(0, window, at_once):
            some = grid[:, :, start : start + at_once]  # [windows, heads, rows, columns, dim]
            of_rows = torch.einsum("nhrcd,rkd->nhrck", some, rows[start : start + at_once])
            of_columns = torch.einsum("nhrcd,ckd->nhrck", some, columns)
            added = (of_rows.unsqueeze(-1) + of_columns.unsqueeze(-2)).flatten(4).flatten(2, 3)
            yield F.scaled_dot_product_attention(some.flatten(2, 3), k, v, attn_mask=added)


def _distances(table: Tensor, side: int) -> Tensor:
    """The entries of a table by distance for each pair of `side` places [side, side, dim]."""
    if len(table) != 2 * side - 1:
        fitted = F.interpolate(table.t().unsqueeze(0).float(), 2 * side - 1, mode="linear")
        table = fitted[0].t().to(table.dtype)
    places = torch.arange(side, device=table.device)
    return table[places.unsqueeze(1) - places + side - 1]


class SamVision(nn.Module):
    """Square pictures of one size -> the neck's features of their patches [N, rows, columns, channels]."""

    def __init__(self, fields: SamFields, pictures: PictureSettings) -> None:
        super().__init__()
        size, channels = fields.hidden_size, fields.output_channels
        self.patches = PatchEmbedding(size, fields.patch_size, pictures, bias=True)
        self.positions = Learned(1, fields.across, fields.across, size)
        self.layers = nn.ModuleList(_layer(fields, number) for number in range(fields.num_hidden_layers))
        self.narrow = Convolution(size, channels, 1)
        self.first_norm = LayerNorm(channels, _NECK_EPS)
        self.mix = Convolution(channels, channels, 3)
        self.last_norm = LayerNorm(channels, _NECK_EPS)

    def pull(self, weights: Weights) -> None:
        load(self.patches, weights / "patch_embed.projection")
        load(self.positions, weights / "pos_embed")
        load(self.layers, weights / "layers")
        load(self.narrow, weights / "neck.conv1")
        load(self.first_norm, weights / "neck.layer_norm1")
        load(self.mix, weights / "neck.conv2")
        load(self.last_norm, weights / "neck.layer_norm2")

    def forward(self, items: Sequence[TowerInput]) -> InLayers[Tensor]:
        _, rows, columns = items[0].grid
        table = self.positions.weight.flatten(0, 2)
        positions = resized_table(table, (rows, columns), "bicubic").repeat(len(items), 1)
        delta, stream = None, ops.add(self.patches(items), positions)
        step = segments([rows * columns] * len(items), stream.device)
        for layer in self.layers:
            with use_context(step):
                delta, stream = layer(delta, stream)
            yield
        _, stream = enter(None, delta, stream)
        narrow = self.first_norm(self.narrow(stream.view(len(items), rows, columns, -1)).flatten(0, 2))
        mixed = self.mix(narrow.view(len(items), rows, columns, -1))
        return self.last_norm(mixed.flatten(0, 2)).view(mixed.shape)


def as_published(weights: Weights) -> Weights:
    """The scope of a tower with the names of its authors, if it has these."""
    return weights.renamed(_PUBLISHED) if "patch_embed.proj.weight" in weights else weights


def _layer(fields: SamFields, number: int) -> TowerLayer:
    size, heads = fields.hidden_size, fields.num_attention_heads
    windowed = number not in fields.global_attn_indexes
    side = fields.window_size if windowed else fields.across
    inner = fields.mlp_dim or 4 * size
    mlp = MLP(size, inner, WHOLE, activation=fields.hidden_act, names=("lin1", "lin2"), bias=True)
    norms = LayerNorm(size, fields.layer_norm_eps), LayerNorm(size, fields.layer_norm_eps)
    attention = GridAttention(heads, size // heads, side, windowed=windowed)
    return TowerLayer(size, heads, mlp, norms, _NAMES, attention=attention)


class GotOcr2Tower(nn.Module):
    """SAM's tower, two convolutions and a linear layer."""

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

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        tiles = cut_tiles(items, self.fields.image_size, self.fields.patch_size)
        rows = self.projector(self.halving((yield from self.sam(tiles))).flatten(0, 1))
        return list(rows.split([item.embeddings for item in items]))
