"""The alignment of a text with its source: attention of heads that are known to follow what is said.

It is what OpenAI's Whisper does: weights of each head are normalised over the tokens, smoothed by a median
over neighbouring positions, and averaged. The way through that matrix is found elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.cross_attention import CrossAttention, find_source_model
from models.parallel.parallel import Parallel


@dataclass(frozen=True, slots=True)
class AlignedText:
    """A text whose tokens have been computed, and its source."""

    queries: Sequence[Tensor]
    """[tokens, heads, head_dim] for each layer that gives some out: those of the heads of this rank."""
    tokens: int
    blocks: Tensor  # [blocks]: where the keys of the source lie
    length: int
    """The positions of the source."""
    columns: int
    """The first of these positions, so many, that count: behind them there is silence."""


class Alignment:
    """The heads whose attention tells where tokens are spoken of."""

    def __init__(
        self,
        heads: Sequence[tuple[int, int]],
        layers: Sequence[CrossAttention],
        parallel: Parallel,
        filter_width: int,
    ) -> None:
        """`heads`: pairs of a layer and a head of it. Raises ValueError if there are no such ones."""
        every = parallel.share_heads(layers[0].all_heads)
        for layer, head in heads:
            if not (0 <= layer < len(layers) and 0 <= head < every.size):
                raise ValueError(
                    f"generation_config.json: alignment_heads names head {head} of layer {layer}, and there "
                    f"are {every.size} in each of {len(layers)} layers"
                )
        self._heads, self._parallel, self._width = sorted(set(heads)), parallel, filter_width
        self._held = range(every.start, every.stop)
        for number, layer in enumerate(layers):
            own = [head - every.start for at, head in self._heads if at == number and head in self._held]
            layer.given_out = own
        self._layers = [layer for layer in layers if layer.given_out]

    def __call__(self, text: AlignedText) -> Tensor:
        """Compute how much each token attends to each position [tokens, columns] float32, alike on all ranks.

        Heads are added in their order, each by the rank that holds it, so that any number of ranks gives the
        same bits.
        """
        own = self._weights(text)
        total = torch.zeros(text.tokens, text.columns, device=text.blocks.device)
        for _, head in self._heads:
            if head in self._held:
                weights = median_filter(_normalised(next(own)[:, : text.columns]), self._width)
            else:
                weights = torch.zeros_like(total)
            total += self._parallel.all_reduce(weights)
        return total / len(self._heads)

    def _weights(self, text: AlignedText) -> Iterator[Tensor]:
        """Yield how much the tokens attend to each position [tokens, length], by each head of this rank."""
        for layer, queries in zip(self._layers, text.queries, strict=True):
            yield from layer.weights(queries, text.blocks, text.length)


def _normalised(weights: Tensor) -> Tensor:
    """Weights [N, columns] less the mean of their column, in units of its deviation; 0 where that is 0."""
    deviation, mean = torch.std_mean(weights, dim=0, unbiased=False)
    return torch.where(deviation > 0, (weights - mean) / deviation, 0.0)


def median_filter(x: Tensor, width: int) -> Tensor:
    """The median of so many neighbours of each number [N, columns], itself in the middle; edges are mirrored.

    Numbers are compared and swapped, all at once, until the middle one of each has come to its place.
    """
    reach = width // 2
    if x.shape[-1] <= reach:
        return x
    padded = F.pad(x, (reach, reach), mode="reflect")
    rows = [padded[:, at : at + x.shape[-1]] for at in range(width)]
    for end in range(width - 1, reach - 1, -1):  # the largest of the first ones comes to `end`
        for at in range(end):
            low, high = torch.minimum(rows[at], rows[at + 1]), torch.maximum(rows[at], rows[at + 1])
            rows[at], rows[at + 1] = low, high
    return rows[reach]


def find_alignment(modules: Iterable[nn.Module]) -> Alignment | None:
    """What compares texts with their sources, if a model has heads for it, among its modules."""
    return getattr(find_source_model(modules), "alignment", None)
