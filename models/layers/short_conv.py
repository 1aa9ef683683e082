"""Short convolutions: a layer that has one between two gates, and the part of other layers with states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.context import context
from models.layers.linear import Linear, RowLinear, cut_of, frozen, pieces_of
from models.layers.state import StateLayer
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span
from models.weight_slices import Cut


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """The sizes of a layer."""

    taps: int
    """The inputs that the convolution sees."""
    bias: bool = False

    def build(self, hidden_size: int, parallel: Parallel) -> ShortConv:
        return ShortConv(hidden_size, self, parallel)


class ShortConv(StateLayer):
    """The channels of one layer that this rank holds: hidden states [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, hidden_size: int, spec: ShortConvSpec, parallel: Parallel) -> None:
        super().__init__()
        self.channels = channels = parallel.share(hidden_size, "channels of short convolutions")
        self.in_proj = Linear(hidden_size, [channels] * 3, bias=spec.bias)
        self.conv = Convolution([channels], spec.taps, bias=spec.bias)
        self.out_proj = RowLinear(channels, hidden_size, parallel, bias=spec.bias)

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [self.conv.state_shape()]

    def input_widths(self) -> list[int]:
        return [self.channels.length]

    def forward(self, x: Tensor) -> Tensor:
        before, after, x = self.in_proj(x).split(self.in_proj.widths, dim=-1)
        inputs = (ops.gate(x, before, "identity"),)
        self.keep_guesses(inputs)
        return self.out_proj(ops.gate(self.read_states(inputs), after, "identity"))

    def read_states(self, inputs: Sequence[Tensor]) -> Tensor:
        (before,), (x,) = self.bound_states(), inputs
        return ops.causal_conv(x, self.conv.weight, self.conv.bias, before, context())


class Convolution(nn.Module):
    """The weights of a short convolution of each channel, of which a checkpoint has [channels, 1, taps]."""

    weight: nn.Parameter  # [taps, channels] float32
    bias: nn.Parameter | None  # [channels] float32

    def __init__(
        self, channels: list[Span], taps: int, *, bias: bool = False, sources: tuple[str, ...] = ()
    ) -> None:
        """`sources`: the tensors of parts, if the checkpoint has one for each beside this layer."""
        super().__init__()
        self.channels = channels
        self.taps = taps
        self.has_bias = bias
        self.sources = sources

    def state_shape(self) -> tuple[int, ...]:
        """The shape of the inputs that are kept of a sequence."""
        return self.taps - 1, sum(part.length for part in self.channels)

    def pull(self, weights: Weights) -> None:
        weight = self._pull(weights, "weight", 1, self.taps).squeeze(1)
        self.weight = frozen(weight.t().contiguous())
        self.bias = frozen(self._pull(weights, "bias")) if self.has_bias else None

    def _pull(self, weights: Weights, name: str, *sizes: int) -> Tensor:
        if self.sources:
            scopes = zip(map(weights.sibling, self.sources), self.channels, strict=True)
            pieces = [_take(scope, name, [part.size, *sizes], cut_of(0, part)) for scope, part in scopes]
            return torch.cat(pieces)
        size = [sum(part.size for part in self.channels), *sizes]
        return torch.cat([_take(weights, name, size, cut) for cut in pieces_of(self.channels)])


def _take(weights: Weights, name: str, size: list[int], cut: Cut | None) -> Tensor:
    return weights.take(name, size, cut, torch.float32)
