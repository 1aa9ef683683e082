"""MiniCPM-V: a SigLIP tower for slices of any shape, whose rows the resampler's learned queries read."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.composites import minicpmv_version
from models.config import ConfigError, Size
from models.layers.linear import Linear, frozen
from models.layers.norm import LayerNorm, enter
from models.towers.blocks import segments
from models.towers.tower import InLayers, TowerInput, TowerSetup, read_tower_fields
from models.towers.vit import VisionTransformer, read_vit

_USUAL = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 980,
    "patch_size": 14,
}
"""Fields of the tower that config.json leaves out."""


class _Fields(msgspec.Struct, frozen=True):
    query_num: Size = 64
    drop_vision_last_layer: bool = False


class MiniCPMVTower(nn.Module):
    levels = 0

    def __init__(self, setup: TowerSetup) -> None:
        super().__init__()
        fields, vit = read_tower_fields(setup.config, _Fields), read_vit(setup.config, _USUAL)
        self.patch, self.across = vit.patch_size, vit.image_size // vit.patch_size
        self.queries = fields.query_num
        self.is_in_line = minicpmv_version(setup.config) == "2.5"
        self.vision = VisionTransformer(vit, setup.pictures, without=int(fields.drop_vision_last_layer))
        self.last_norm = vit.norm()
        self.resampler = Resampler(fields.query_num, vit.hidden_size, setup.hidden_size)

    def pull(self, weights: Weights) -> None:
        tower = weights / "vpm"
        load(self.vision, tower)
        load(self.last_norm, tower / "post_layernorm")
        load(self.resampler, weights / "resampler")

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        shapes = [self._slices(item) for item in items]
        slices = [shape for each in shapes for shape in each]
        counts = [item.pixels[..., 0].numel() // self.patch**2 for item in items]
        cells = self.vision.patches(items).split(counts)
        used = [part[: sum(map(prod, each))] for part, each in zip(cells, shapes, strict=True)]
        places = torch.cat([self._places(*shape) for shape in slices])
        stream = torch.cat(used) + self.vision.positions.weight[places.to(used[0].device)]
        step = segments([prod(shape) for shape in slices], stream.device)
        rows, _ = enter(self.last_norm, *(yield from self.vision.layers(step, stream)))
        return list(self.resampler(rows, slices).split([item.embeddings for item in items]))

    def _slices(self, item: TowerInput) -> list[tuple[int, int]]:
        """The rows and columns of patches of the whole and of its slices, which `models.media` has joined."""
        height, width, _ = item.pixels.shape
        down, across = height // self.patch, width // self.patch
        count = item.embeddings // self.queries - 1
        if not count:
            return [(down, across)]
        in_column, rows, columns = item.grid
        below = -(-rows * columns // across)
        part = rows // in_column, columns * in_column // count
        return [(down - below, across), *[part] * count]

    def _places(self, rows: int, columns: int) -> Tensor:
        """The entries of the table of positions for a slice's patches. MiniCPM-V 2.5 takes the patches of
        a slice for a single row of them."""
        if self.is_in_line:
            rows, columns = 1, rows * columns
        down, across = (self._buckets(count) for count in (rows, columns))
        return (down.unsqueeze(1) * self.across + across).flatten()

    def _buckets(self, count: int) -> Tensor:
        """The part of a side into which the fraction of each of so many patches falls, as its float32 is
        rounded by the very calls of the published code."""
        bounds = torch.arange(1 / self.across, 1.0, 1 / self.across)
        fractions = torch.arange(0, 1 - 1e-6, float(torch.tensor(1.0) / count))
        return torch.bucketize(fractions, bounds, right=True)


_HEAD = 128
_EPS = 1e-6


class Resampler(nn.Module):
    """One cross-attention, in the form and under the names of torch's MultiheadAttention. Keys know their row
    and column in the picture, and values do not."""

    queries: nn.Parameter  # [heads, queries, head]: normalised and projected
    in_matrices: nn.ParameterList  # of keys, and of values
    in_biases: list[Tensor]
    projection: nn.Parameter

    def __init__(self, queries: int, inputs: int, size: int) -> None:
        """`inputs`: the width of the tower's rows; `size`: that of the text's embeddings."""
        super().__init__()
        if size % _HEAD:
            raise ConfigError(
                f"config.json: a hidden_size of {size} is not a multiple of the {_HEAD} of a head"
            )
        self.count, self.size = queries, size
        self.kv_proj = Linear(inputs, size)
        self.kv_norm, self.last_norm = LayerNorm(size, _EPS), LayerNorm(size, _EPS)
        self.out = Linear(size, size, bias=True)

    def pull(self, weights: Weights) -> None:
        size, attention = self.size, weights / "attn"
        matrix = attention.take("in_proj_weight", [3 * size, size])
        bias = attention.take("in_proj_bias", [3 * size])
        query = weights.take("query", [self.count, size]).float()
        scale, shift = (weights.take(f"ln_q.{kind}", [size]).float() for kind in ("weight", "bias"))
        normed = F.layer_norm(query, [size], scale, shift, _EPS)
        projected = F.linear(normed, matrix[:size].float(), bias[:size].float()).to(matrix.dtype)
        self.queries = frozen(self._heads(projected).contiguous())
        self.in_matrices = nn.ParameterList(
            frozen(ops.pack(part.contiguous())) for part in matrix[size:].chunk(2)
        )
        self.in_biases = [part.contiguous() for part in bias[size:].chunk(2)]
        self.projection = frozen(ops.pack(weights.take("proj", [size, size]).t().contiguous()))
        for part, name in ((self.kv_proj, "kv_proj"), (self.kv_norm, "ln_kv"), (self.last_norm, "ln_post")):
            load(part, weights / name)
        load(self.out, attention / "out_proj")

    def forward(self, x: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """x [T, inputs]: the rows of pictures of these rows and columns, packed -> [N * queries, size]."""
        pieces = x.split([rows * columns for rows, columns in grids])
        read = [self._read(piece, *grid) for piece, grid in zip(pieces, grids, strict=True)]
        return ops.linear(self.last_norm(self.out(torch.cat(read))), self.projection, None)

    def _read(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """What the queries read of one picture [queries, size]. Pictures take turns, for their keys and
        values need more memory than the tower does."""
        values = self.kv_norm(self.kv_proj(x))
        keys = values + sine_positions(rows, columns, self.size, x.device).to(values.dtype)
        keys, values = (
            self._heads(ops.linear(each, matrix, bias))
            for each, matrix, bias in zip((keys, values), self.in_matrices, self.in_biases, strict=True)
        )
        heads = F.scaled_dot_product_attention(self.queries[None], keys[None], values[None])[0]
        return heads.transpose(0, 1).reshape(self.count, self.size)

    def _heads(self, rows: Tensor) -> Tensor:
        """Cut rows [T, size] by head: [heads, T, head]."""
        return rows.view(len(rows), -1, _HEAD).transpose(0, 1)


def sine_positions(rows: int, columns: int, size: int, device: torch.device) -> Tensor:
    """The positions of a grid's cells [rows * columns, size] float32: half of each is of the column, the
    other half of the row, and of each half the sines come first."""
    quarter = size // 4
    frequencies = 1.0 / 10_000 ** (torch.arange(quarter, dtype=torch.float32, device=device) / quarter)

    def of(count: int) -> Tensor:
        angles = torch.outer(torch.arange(count, dtype=torch.float32, device=device), frequencies)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    return torch.cat([of(columns).repeat(rows, 1), of(rows).repeat_interleave(columns, 0)], dim=1)
