"""Norms over hidden states, over heads, and over a projection whose heads are spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.layers.linear import RowOrder, cut_of, frozen
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span
from models.weight_slices import Cut


class RMSNorm(nn.Module):
    """RMS norm. `source` is its name in the checkpoint, if that is not the module's own.

    Gemma stores w and means 1 + w: with `offset` 1 the sum is made once and stays in float32, for in half
    precision the digits of a small w would be lost.
    """

    weight: nn.Parameter

    def __init__(self, size: int, eps: float, *, source: str = "", offset: float = 0.0) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.source = source
        self.offset = offset

    def pull(self, weights: Weights) -> None:
        scope = weights.sibling(self.source) if self.source else weights
        if self.offset:
            self.weight = frozen(scope.take("weight", [self.size], dtype=torch.float32) + self.offset)
        else:
            self.weight = frozen(scope.take("weight", [self.size]))

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add and normalise: -> (norm of the sum, the sum)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class PlainRMSNorm(RMSNorm):
    """RMS norm without weights: they are all 1, and not stored."""

    def pull(self, weights: Weights) -> None:
        self.weight = frozen(torch.ones(self.size, dtype=weights.dtype, device=weights.device))


class FrontRMSNorm(RMSNorm):
    """RMS norm of the first `size` numbers of each row; the others pass."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.front_rms_norm(x, self.weight, self.eps)


class SpreadRMSNorm(nn.Module):
    """RMS norm over a projection [T, span.size] of which this rank holds a span."""

    weight: nn.Parameter

    def __init__(self, span: Span, eps: float, parallel: Parallel) -> None:
        super().__init__()
        self.span = span
        self.eps = eps
        self.parallel = parallel
        self.sections = parallel.sections(span)
        # A head that several ranks hold enters the sum over ranks several times.
        self.summed = parallel.size * span.length

    def pull(self, weights: Weights) -> None:
        cut = None if self.span.is_whole else Cut(0, self.span.start, self.span.stop)
        self.weight = frozen(weights.take("weight", [self.span.size], cut))

    def forward(self, x: Tensor) -> Tensor:
        squares = self.parallel.all_reduce(ops.sum_squares(x, self.sections))  # [T, 1] float32
        return ops.spread_rms_norm(x, self.weight, squares, self.summed, self.eps)


class LayerNorm(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        source: str = "",
        offset: float = 0.0,
        weighted: bool = True,
        order: RowOrder | None = None,
    ) -> None:
        """`dtype` is the number type of its tensors; None means the model's.

        `source` and `offset` are as in `RMSNorm`. If it is not `weighted`, the checkpoint has none of it.
        `order`: the order in which its numbers are wanted, if that is not theirs.
        """
        super().__init__()
        self.size = size
        self.eps = eps
        self.has_bias = bias
        self.dtype = torch.float32 if offset else dtype
        self.source = source
        self.offset = offset
        self.weighted = weighted
        self.order = order

    def pull(self, weights: Weights) -> None:
        if not self.weighted:
            ones = torch.ones(self.size, dtype=weights.dtype, device=weights.device)
            self.weight, self.bias = frozen(ones), None
            return
        scope = weights.sibling(self.source) if self.source else weights
        # Checkpoints that were converted from TensorFlow say gamma and beta.
        weight, bias = ("gamma", "beta") if "gamma" in scope else ("weight", "bias")
        taken = self._take(scope, weight)
        self.weight = frozen(taken + self.offset if self.offset else taken)
        self.bias = frozen(self._take(scope, bias)) if self.has_bias else None

    def _take(self, scope: Weights, name: str) -> Tensor:
        taken = scope.take(name, [self.size], dtype=self.dtype)
        return taken if self.order is None else taken[self.order.order(self.size).to(taken.device)]

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add and normalise: -> (norm of the sum, the sum)."""
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class HeadLayerNorm(nn.Module):
    """Layer norm of each head of a projection [T, heads * dim], with weights for each head and without bias.

    The checkpoint has them as one matrix, or a vector for each head under `norms`.
    """

    weight: nn.Parameter  # [heads, dim]

    def __init__(self, heads: Span, dim: int, eps: float, order: RowOrder | None = None) -> None:
        """`order`: the order in which the rows of a head are wanted, if that is not theirs."""
        super().__init__()
        self.heads = heads
        self.dim = dim
        self.eps = eps
        self.order = order

    def pull(self, weights: Weights) -> None:
        cut = cut_of(0, self.heads)
        if "norms.0.weight" in weights:
            rows = [weights.take(f"norms.{head}.weight", [self.dim]) for head in range(self.heads.size)]
            taken = torch.stack(rows) if cut is None else cut.of(torch.stack(rows))
        else:
            taken = weights.take("weight", [self.heads.size, self.dim], cut)
        if self.order is not None:
            taken = taken[:, self.order.order(self.dim).to(taken.device)]
        self.weight = frozen(taken)

    def forward(self, x: Tensor) -> Tensor:
        # Weights that differ by head are known to no kernel.
        heads = x.float().unflatten(-1, (-1, self.dim))
        normed = torch.nn.functional.layer_norm(heads, (self.dim,), eps=self.eps)
        return (normed * self.weight.float()).flatten(-2).to(x.dtype)


Norm = RMSNorm | LayerNorm
"""The norms that also normalise a sum."""


def enter(norm: nn.Module | None, delta: Tensor | None, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Complete the stream -> (the next sublayer's input, the stream). The first sublayer has no delta."""
    if not isinstance(norm, Norm):  # the family has no such norm, or another stage has it
        stream = stream if delta is None else ops.add(stream, delta)
        return stream, stream
    return (norm(stream), stream) if delta is None else norm.add(delta, stream)
