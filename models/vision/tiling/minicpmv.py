"""MiniCPM-V: a SigLIP tower for slices of any shape, whose rows the resampler reads."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec
import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.composites import minicpmv_version
from models.config import Size
from models.context import use_context
from models.layers.norm import enter
from models.vision.blocks import Learned, PatchEmbedding, segments
from models.vision.resampler import Resampler
from models.vision.tower import TowerInput, TowerSetup
from models.vision.tower_inputs import read_tower_fields
from models.vision.vit import read_vit

_USUAL = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 980,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""Fields of the tower that config.json leaves out."""

_Shape = tuple[int, int]
"""The rows and columns of patches that a slice has."""


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
        self.patches = PatchEmbedding(vit.hidden_size, vit.patch_size, setup.pictures, bias=True)
        self.positions = Learned(self.across**2, vit.hidden_size, name="weight")
        self.layers = vit.layers(without=int(fields.drop_vision_last_layer))
        self.last_norm = vit.norm()
        self.resampler = Resampler(fields.query_num, vit.hidden_size, setup.hidden_size)

    def pull(self, weights: Weights) -> None:
        tower = weights / "vpm"
        load(self.patches, tower / "embeddings.patch_embedding")
        load(self.positions, tower / "embeddings.position_embedding")
        load(self.layers, tower / "encoder.layers")
        load(self.last_norm, tower / "post_layernorm")
        load(self.resampler, weights / "resampler")

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        shapes = [self._slices(item) for item in items]
        slices = [shape for each in shapes for shape in each]
        cells = self.patches(items).split([item.pixels[..., 0].numel() // self.patch**2 for item in items])
        used = [part[: sum(map(prod, each))] for part, each in zip(cells, shapes, strict=True)]
        places = torch.cat([self._places(*shape) for shape in slices])
        stream = torch.cat(used) + self.positions.weight[places.to(used[0].device)]
        with use_context(segments([prod(shape) for shape in slices], stream.device)):
            delta, stream = self.layers(stream)
        rows, _ = enter(self.last_norm, delta, stream)
        return list(self.resampler(rows, slices).split([item.embeddings for item in items]))

    def _slices(self, item: TowerInput) -> list[_Shape]:
        """The whole picture and the slices of an item, whose patches `models.media` has joined."""
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
