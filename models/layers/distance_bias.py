"""Learned biases of attention by the distance from query to key, which T5 and MPNet keep in buckets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights
from models.layers.linear import frozen
from models.parallel.rank_shares import Span
from models.weight_pieces import Cut


@dataclass(frozen=True)
class Buckets:
    """The buckets in which a checkpoint keeps its distances."""

    count: int = 32
    reach: int = 128
    """The distance beyond which all keys share the last bucket of their side."""
    ahead: bool = True
    """Whether half of them are for keys that stand after the query; else no query sees such a key."""

    def of(self, distance: Tensor) -> Tensor:
        """The bucket of each distance from a query to a key.

        Half of those of a side have one distance each, and the others grow like a logarithm.
        """
        side = self.count // 2 if self.ahead else self.count
        near = side // 2
        away = distance.abs() if self.ahead else -distance.clamp(max=0)
        grown = torch.log(away.float() / near) / math.log(self.reach / near) * (side - near)
        far = (near + grown.clamp(min=0).long()).clamp(max=side - 1)
        return torch.where((distance > 0) & self.ahead, side, 0) + torch.where(away < near, away, far)


def read_bias(weights: Weights, heads: Span, buckets: Buckets) -> nn.Parameter:
    """Read the biases of these heads [heads, 2 * reach + 1] float32, as attention takes them."""
    cut = None if heads.is_whole else Cut(1, heads.start, heads.stop)
    values = weights.take("weight", [buckets.count, heads.size], cut)  # [buckets, heads]
    rows = buckets.of(torch.arange(-buckets.reach, buckets.reach + 1))
    return frozen(values[rows.to(values.device)].t().float().contiguous())
