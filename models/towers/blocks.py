"""The parts of which towers are made: patches, learned tensors, layers whose norms come first, projectors.

Pictures are computed packed, as texts are: `segments` makes the context in which tokens of one see no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.context import ForwardContext, use_context
from models.layers.attention import EncoderAttention
from models.layers.linear import Linear, frozen
from models.layers.mlp import activation_kind
from models.layers.norm import Norm, enter
from models.media.files import PictureSettings
from models.ops.attention_inputs import HeadPrep
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span
from models.towers.tower import InLayers, TowerInput

WHOLE = Parallel(most_ranks=1)
"""The position of a rank in a tower, which every rank has whole."""


def segments(lengths: Sequence[int], device: torch.device) -> ForwardContext:
    """The context of items of so many rows, packed one after the other, in which each row sees its item."""
    host = list(lengths)
    counts = torch.tensor(host, dtype=torch.int32)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(counts)
    none = torch.empty(0, dtype=torch.int32, device=device)
    return ForwardContext(
        positions=positions.to(device),
        query_starts=starts.to(device),
        kv_lens=counts.to(device),
        block_table=none.view(0, 0),
        slot_mapping=none.long(),
        block_size=1,
        query_lens_host=host,
        kv_lens_host=host,
    )


class PatchEmbedding(nn.Module):
    """Pixels -> a row [size] for each patch. The checkpoint has the matrix in the shape of a convolution."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    levels: Tensor  # [3, 256]: the normalised number of each value of each channel

    def __init__(
        self, size: int, side: int, pictures: PictureSettings, *, bias: bool, depth: int = 1, merge: int = 1
    ) -> None:
        """`depth`: the frames of a patch, if the convolution has them. `merge`: as in `ops.patches`."""
        super().__init__()
        self.size, self.side, self.depth, self.merge = size, side, depth, merge
        self.in_time = (depth,) if depth > 1 else ()
        self.has_bias = bias
        self.pictures = pictures

    def pull(self, weights: Weights) -> None:
        self.weight = frozen(ops.pack(self.read(weights), plain=True))
        self.bias = frozen(weights.take("bias", [self.size])) if self.has_bias else None
        self.levels = _levels(self.pictures).to(weights.device, weights.dtype)

    def read(self, weights: Weights) -> Tensor:
        """The matrix [size, numbers of a patch], which come by channel, frame, row and column."""
        return weights.take("weight", (self.size, 3, *self.in_time, self.side, self.side)).flatten(1)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        """The patches of all items [P, size]."""
        return ops.linear(self.cut(items), self.weight, self.bias)

    def cut(self, items: Sequence[TowerInput]) -> Tensor:
        """The normalised numbers of the patches of all items, as `ops.patches` orders them."""
        frames = [self._frames(item) for item in items]
        if len({each.shape for each in frames}) == 1 and self.depth == 1:
            frames = [torch.cat(frames)]
        cut = [
            ops.patches(each, self.levels, self.side, depth=self.depth, merge=self.merge) for each in frames
        ]
        return cut[0] if len(cut) == 1 else torch.cat(cut)

    def _frames(self, item: TowerInput) -> Tensor:
        """The pixels [F, height, width, 3] of an item; the frames of a video lie below each other."""
        height, pixels = item.grid[1] * self.side, item.pixels
        return pixels.unflatten(0, (-1, height)) if item.kind == "video" else pixels.unsqueeze(0)


class PixelPatches(PatchEmbedding):
    """Patches whose numbers the checkpoint orders by row, column and channel."""

    def read(self, weights: Weights) -> Tensor:
        stored = weights.take("weight", [self.size, self.side * self.side * 3])
        return stored.unflatten(1, (-1, 3)).transpose(1, 2).flatten(1)


def _levels(pictures: PictureSettings) -> Tensor:
    """What every value becomes in each channel [3, 256] float32, rounded where transformers rounds."""
    scaled = (torch.arange(256, dtype=torch.float64) * pictures.rescale_factor).float()
    mean, deviation = (torch.tensor(each).unsqueeze(1) for each in (pictures.image_mean, pictures.image_std))
    return (scaled - mean) / deviation


class Learned(nn.Module):
    """A tensor that is used as it is: a class token, a table of positions, factors of a layer."""

    weight: nn.Parameter

    def __init__(self, *shape: int, name: str = "") -> None:
        """`name` is that of the tensor within the module's scope; without one, the scope names the tensor."""
        super().__init__()
        self.shape, self.name = shape, name

    def pull(self, weights: Weights) -> None:
        self.weight = frozen(weights.take(self.name, self.shape))


@dataclass(frozen=True, kw_only=True)
class TowerNames:
    """The names of a layer's parts in the checkpoint."""

    qkv: tuple[str, ...]
    """The names of queries, keys and values: three, or one if they are one matrix."""
    out: str
    norms: tuple[str, str]
    """The names of the norms ahead of attention and ahead of the MLP."""
    mlp: str = "mlp"
    attention: str = ""
    """The scope of tensors that attention itself has; empty if there are none."""
    scales: tuple[str, ...] = ()
    """The names of factors [size] with which the results of attention and of the MLP are multiplied."""


class TowerLayer(nn.Module):
    """Attention and an MLP, each behind a norm, whose results are added to the stream."""

    pauses: ClassVar[bool] = True

    def __init__(
        self,
        size: int,
        heads: int,
        mlp: nn.Module,
        norms: tuple[Norm, Norm],
        names: TowerNames,
        *,
        head_dim: int | None = None,
        key_heads: int | None = None,
        bias: bool = True,
        out_bias: bool = True,
        causal: bool = False,
        attention: nn.Module | None = None,
    ) -> None:
        """`head_dim`: the width of a head, if it is not that of an equal part of `size`. `key_heads`: the
        number of heads of keys and values, if it is not that of queries.

        `bias`: whether queries, keys and values have biases; `out_bias`: whether what follows attention has
        one. `causal`: whether rows see no later ones. `attention`: what takes the place of
        `EncoderAttention`, with its arguments.
        """
        super().__init__()
        dim = head_dim or size // heads
        part, keys = Span.whole(heads * dim), Span.whole((key_heads or heads) * dim)
        self.names = names
        sources = names.qkv if len(names.qkv) > 1 else ()
        self.qkv = Linear(size, [part, keys, keys], bias=bias, sources=sources)
        self.attention = attention or EncoderAttention(head_dim=dim, scale=dim**-0.5, causal=causal)
        self.out = Linear(part, size, bias=out_bias)
        self.mlp = mlp
        self.norms = nn.ModuleList(norms)
        self.scales = nn.ModuleList(Learned(size) for _ in names.scales)

    def pull(self, weights: Weights) -> None:
        names = self.names
        load(self.qkv, weights / (names.qkv[0] if len(names.qkv) == 1 else "qkv"))
        if names.attention:
            load(self.attention, weights / names.attention)
        load(self.out, weights / names.out)
        load(self.mlp, weights / names.mlp)
        for part, name in zip((*self.norms, *self.scales), (*names.norms, *names.scales), strict=True):
            load(part, weights / name)

    def forward(
        self, delta: Tensor | None, stream: Tensor, cos_sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take the stream [T, size] and what is still to be added to it, and return both."""
        normed, stream = enter(self.norms[0], delta, stream)
        q, k, v = self.qkv(normed).split(self.qkv.widths, dim=-1)
        delta = self._scaled(0, self.out(self.attention(q, k, v, HeadPrep(cos_sin))))
        normed, stream = enter(self.norms[1], delta, stream)
        return self._scaled(1, self.mlp(normed)), stream

    def _scaled(self, place: int, x: Tensor) -> Tensor:
        if not self.scales:
            return x
        return x * cast("Learned", self.scales[place]).weight


class TowerLayers(nn.ModuleList):
    """Layers one after the other. The checkpoint may have `others` behind them, which are not used."""

    def __init__(self, count: int, build: Callable[[], TowerLayer], others: int = 0) -> None:
        super().__init__(build() for _ in range(count))
        self.others = others

    def pull(self, weights: Weights) -> None:
        for number, layer in enumerate(self):
            load(layer, weights / str(number))
        weights.ignore(*(str(len(self) + number) for number in range(self.others)))

    def forward(
        self, step: ForwardContext, stream: Tensor, cos_sin: Tensor | None = None
    ) -> InLayers[tuple[Tensor | None, Tensor]]:
        """The stream [T, size] behind the last layer, and what is still to be added to it, ahead of it.
        `step`: the context of the items of which it is the rows."""
        delta = None
        for layer in self:
            with use_context(step):
                delta, stream = layer(delta, stream, cos_sin)
            yield
        return delta, stream


class Projector(nn.Module):
    """Two linear layers with an activation between."""

    def __init__(self, inputs: int, size: int, *, activation: str, bias: bool) -> None:
        super().__init__()
        self.linear_1 = Linear(inputs, size, bias=bias, activation=activation_kind(activation))
        self.linear_2 = Linear(size, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.linear_1(x))


def merge_squares(x: Tensor, rows: int, columns: int, side: int) -> Tensor:
    """Lay the rows of x [N * rows * columns, size] that form squares side by side, row by row of a square:
    [N * rows * columns / side**2, side**2 * size]."""
    cut = x.view(-1, rows // side, side, columns // side, side, x.shape[-1])
    return cut.transpose(2, 3).reshape(-1, side * side * x.shape[-1])
