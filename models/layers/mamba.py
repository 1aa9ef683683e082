"""Mamba-2 and the first Mamba as layers: scans of states that forget by the time that a token takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from models import ops
from models.checkpoint.weights import Weights, load_children
from models.config import ConfigError
from models.context import context
from models.layers.linear import Linear, RowLinear, cut_of, frozen
from models.layers.norm import PlainRMSNorm, RMSNorm
from models.layers.short_conv import Convolution
from models.layers.state import StateLayer
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span


@dataclass(frozen=True)
class Multipliers:
    """Factors of what a layer projects its input to."""

    gates: float = 1.0
    values: float = 1.0
    keys: float = 1.0
    queries: float = 1.0
    steps: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """The sizes of a layer of Mamba-2, and the kind of its norm."""

    heads: int
    head_dim: int
    groups: int
    """The number of groups of neighbouring heads that share keys and queries."""
    state_size: int
    """The width of keys and queries."""
    taps: int
    """The inputs that the convolution before the scan sees."""
    eps: float
    bias: bool = False
    """Whether the projection of the layer's input has a bias."""
    out_bias: bool = False
    conv_bias: bool = True
    limits: tuple[float, float] = (0.0, float("inf"))
    """The least and the longest time that passes with a token."""
    norm: Literal["gated", "before gates"] | None = "gated"
    """Whether groups are normalised with their gates, before these, or not at all."""
    multipliers: Multipliers = Multipliers()

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ConfigError(
                f"config.json: {self.heads} Mamba heads cannot be divided evenly into {self.groups} groups"
            )

    def build(self, hidden_size: int, parallel: Parallel) -> Mamba:
        return Mamba(hidden_size, self, parallel)


class Mamba(StateLayer):
    """The heads of one layer that this rank holds: hidden states [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, hidden_size: int, spec: MambaSpec, parallel: Parallel) -> None:
        super().__init__()
        self.spec = spec
        self.parallel = parallel
        self.heads = parallel.share(spec.heads, "Mamba heads")
        self.groups = (
            Span.whole(1) if spec.groups == 1 else parallel.share(spec.groups, "groups of Mamba heads")
        )
        self.inner, shared = self.heads.times(spec.head_dim), self.groups.times(spec.state_size)
        mixed = [self.inner, shared, shared]
        self.in_proj = Linear(hidden_size, [self.inner, *mixed, self.heads], bias=spec.bias)
        self.widths = [self.inner.length, sum(part.length for part in mixed), self.heads.length]
        self.conv1d = Convolution(mixed, spec.taps, bias=spec.conv_bias)
        self.out_proj = RowLinear(self.inner, hidden_size, parallel, bias=spec.out_bias)
        held = parallel.sections(self.inner)
        self.sections = 1 if held % self.groups.length else held // self.groups.length

    def pull(self, weights: Weights) -> None:
        load_children(self, weights)
        factors = self.spec.multipliers
        each = zip((factors.values, factors.keys, factors.queries), self.conv1d.channels, strict=True)
        channels = torch.cat([torch.full((part.length,), factor) for factor, part in each])
        self.conv1d.weight = frozen(self.conv1d.weight * channels.to(weights.device))
        rates, shifts, skips = (_pull(weights, name, self.heads) for name in ("A_log", "dt_bias", "D"))
        self.speeds, self.shifts, self.skips = frozen(-rates.exp()), frozen(shifts), frozen(skips)
        if self.spec.norm is not None:
            self.norm = frozen(_pull(weights, "norm.weight", self.inner))

    def state_shapes(self) -> list[tuple[int, ...]]:
        heads = (self.heads.length, self.spec.state_size, self.spec.head_dim)
        return [self.conv1d.state_shape(), heads]

    def input_widths(self) -> list[int]:
        return self.widths[1:]

    def forward(self, x: Tensor) -> Tensor:
        gates, mixed, steps = self.in_proj(x).split(self.widths, dim=-1)
        factors = self.spec.multipliers
        gates, steps = _scaled(gates, factors.gates), _scaled(steps, factors.steps)
        inputs = mixed, steps
        self.keep_guesses(inputs)
        return self.out_proj(self._gated(self.read_states(inputs), gates))

    def read_states(self, inputs: Sequence[Tensor]) -> Tensor:
        step, (before, states), (mixed, steps) = context(), self.bound_states(), inputs
        mixed = ops.causal_conv(mixed, self.conv1d.weight, self.conv1d.bias, before, step, "silu")
        return ops.selective_scan(
            mixed,
            steps,
            self.speeds,
            self.shifts,
            self.skips,
            self.spec.limits,
            states,
            step,
            self.groups.length,
        )

    def _gated(self, x: Tensor, gates: Tensor) -> Tensor:
        """Normalise groups of features [T, F], and multiply them by silu of their gates."""
        if self.spec.norm is None:
            return ops.gate(x, gates, "silu")
        before = None if self.spec.norm == "before gates" else gates
        squares = ops.group_squares(x, before, self.groups.length, self.sections)
        if self.groups.size == 1:  # ranks hold parts of the only group
            squares = self.parallel.all_reduce(squares)
        count = self.inner.size // self.groups.size
        return ops.gated_group_norm(x, gates, self.norm, squares, count, self.spec.eps)


@dataclass(frozen=True, kw_only=True)
class ChannelScanSpec:
    """The sizes of a layer of the first Mamba, and its norms."""

    channels: int
    state_size: int
    """The width of keys and queries."""
    rank: int
    """The width of what the time steps of channels are projected from."""
    taps: int
    bias: bool = False
    conv_bias: bool = True
    norm: Literal["weighted", "plain"] | None = None
    """Whether keys, queries and what time steps are projected from are normalised, and with weights."""
    eps: float = 1e-6

    def build(self, hidden_size: int, parallel: Parallel) -> ChannelScan:
        return ChannelScan(hidden_size, self, parallel)


class ChannelScan(StateLayer):
    """The channels of one layer that this rank holds: hidden states [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, hidden_size: int, spec: ChannelScanSpec, parallel: Parallel) -> None:
        super().__init__()
        self.spec = spec
        self.channels = parallel.share(spec.channels, "Mamba channels")
        self.widths = [spec.rank, spec.state_size, spec.state_size]
        self.in_proj = Linear(hidden_size, [self.channels, self.channels], bias=spec.bias)
        self.conv1d = Convolution([self.channels], spec.taps, bias=spec.conv_bias)
        self.x_proj = RowLinear(self.channels, sum(self.widths), parallel)
        self.dt_proj = Linear(spec.rank, self.channels, plain=True)
        self.out_proj = RowLinear(self.channels, hidden_size, parallel, bias=spec.bias)
        if spec.norm is not None:
            norm = RMSNorm if spec.norm == "weighted" else PlainRMSNorm
            self.dt_layernorm = norm(spec.rank, spec.eps)
            self.b_layernorm = norm(spec.state_size, spec.eps)
            self.c_layernorm = norm(spec.state_size, spec.eps)

    def pull(self, weights: Weights) -> None:
        load_children(self, weights)
        rates = _pull(weights, "A_log", self.channels, self.spec.state_size)
        self.speeds = frozen(-rates.exp().t().contiguous())
        self.shifts = frozen(_pull(weights, "dt_proj.bias", self.channels))
        self.skips = frozen(_pull(weights, "D", self.channels))

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [self.conv1d.state_shape(), (self.spec.state_size, self.channels.length)]

    def input_widths(self) -> list[int]:
        return [self.channels.length, self.channels.length, *self.widths[1:]]

    def forward(self, x: Tensor) -> Tensor:
        mixed, gates = self.in_proj(x).split(self.in_proj.widths, dim=-1)
        x = self._convolve(mixed)
        steps, keys, queries = self.x_proj(x).split(self.widths, dim=-1)
        if self.spec.norm is not None:
            steps, keys, queries = self.dt_layernorm(steps), self.b_layernorm(keys), self.c_layernorm(queries)
        steps = self.dt_proj(steps)
        self.keep_guesses((mixed, steps, keys, queries))
        return self.out_proj(ops.gate(self._scan(x, steps, keys, queries), gates, "silu"))

    def read_states(self, inputs: Sequence[Tensor]) -> Tensor:
        mixed, steps, keys, queries = inputs
        return self._scan(self._convolve(mixed), steps, keys, queries)

    def _convolve(self, mixed: Tensor) -> Tensor:
        weight, bias = self.conv1d.weight, self.conv1d.bias
        return ops.causal_conv(mixed, weight, bias, self.bound_states()[0], context(), "silu")

    def _scan(self, x: Tensor, steps: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
        states, constants = self.bound_states()[1], (self.speeds, self.shifts, self.skips)
        return ops.channel_scan(x, steps, keys, queries, *constants, states, context())


def _pull(weights: Weights, name: str, piece: Span, *sizes: int) -> Tensor:
    return weights.take(name, [piece.size, *sizes], cut_of(0, piece), torch.float32)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else ops.scale(x, factor)
