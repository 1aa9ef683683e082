"""The gated delta rule as layers: linear attention whose state learns values under keys, and forgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from models import ops
from models.checkpoint.weights import Weights, load_children
from models.context import context
from models.layers.linear import Interleaved, Linear, RowLinear, cut_of, frozen, pieces_of
from models.layers.norm import RMSNorm
from models.layers.short_conv import Convolution
from models.layers.state import StateLayer
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """The sizes of a layer, and how a checkpoint holds its projections."""

    key_heads: int
    value_heads: int
    """The number of value heads, of which neighbours share a key head."""
    key_dim: int
    value_dim: int
    taps: int
    """The inputs that the convolution before the rule sees."""
    eps: float
    saved: Literal["by part", "by key head", "gates by key head", "apart"] = "by part"
    """Whether gates have a matrix of their own, or each key head has one of all, or one of what learns and
    forgets, or each part has its own."""
    most_rate: float = 1.0
    """The rate at which a head learns at most."""
    takes_turns: bool = False
    """Whether value head i has key head i modulo their number; else neighbours share one."""

    def build(self, hidden_size: int, parallel: Parallel) -> GatedDeltaNet:
        return GatedDeltaNet(hidden_size, self, parallel)


class GatedDeltaNet(StateLayer):
    """The heads of one layer that this rank holds: hidden states [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, hidden_size: int, spec: DeltaSpec, parallel: Parallel) -> None:
        super().__init__()
        self.value_heads = parallel.share(spec.value_heads, "value heads of linear attention")
        if spec.takes_turns:
            self.key_heads = _key_heads_of(self.value_heads, spec.key_heads)
        else:
            self.key_heads = parallel.share(spec.key_heads, "key heads of linear attention")
        self.spec = spec
        q, v = self.key_heads.times(spec.key_dim), self.value_heads.times(spec.value_dim)
        self.mixed = [q, q, v]
        """The parts that pass the convolution: queries, keys, values."""
        if spec.saved != "by key head":
            sources = ("q_proj", "k_proj", "v_proj") if spec.saved == "apart" else ("in_proj_qkv",) * 3
            self.in_proj_qkvz = Linear(hidden_size, [q, q, v, v], sources=(*sources, "in_proj_z"))
        else:
            values = spec.value_heads // spec.key_heads * spec.value_dim
            each = Interleaved((spec.key_dim, spec.key_dim, values, values))
            self.in_proj_qkvz = _by_key_head(hidden_size, self.key_heads, each, "in_proj_qkvz")
        if spec.saved in ("by part", "apart"):
            self.in_proj_ba = Linear(
                hidden_size,
                [self.value_heads, self.value_heads],
                sources=("in_proj_b", "in_proj_a"),
                plain=True,
            )
        else:
            each = Interleaved((spec.value_heads // spec.key_heads,) * 2)
            self.in_proj_ba = _by_key_head(hidden_size, self.key_heads, each, "in_proj_ba", plain=True)
        convolutions = ("q_conv1d", "k_conv1d", "v_conv1d") if spec.saved == "apart" else ()
        self.conv1d = Convolution(self.mixed, spec.taps, sources=convolutions)
        self.head_norm = RMSNorm(spec.value_dim, spec.eps)
        self.out_proj = RowLinear(v, hidden_size, parallel)

    def pull(self, weights: Weights) -> None:
        load_children(self, weights)
        heads, size = self.value_heads, [self.spec.value_heads]
        rates, shifts = (
            torch.cat([weights.take(name, size, cut, torch.float32) for cut in pieces_of([heads])])
            for name in ("A_log", "dt_bias")
        )
        self.speeds, self.shifts = frozen(-rates.exp()), frozen(shifts)

    def state_shapes(self) -> list[tuple[int, ...]]:
        heads = (self.value_heads.length, self.spec.key_dim, self.spec.value_dim)
        return [self.conv1d.state_shape(), heads]

    def input_widths(self) -> list[int]:
        return [sum(part.length for part in self.mixed), 2 * self.value_heads.length]

    def forward(self, x: Tensor) -> Tensor:
        widths = [self.input_widths()[0], self.mixed[-1].length]
        mixed, opening = self.in_proj_qkvz(x).split(widths, dim=-1)
        inputs = mixed, self.in_proj_ba(x)
        self.keep_guesses(inputs)
        out = self.read_states(inputs)
        return self.out_proj(ops.gated_norm(out, opening, self.head_norm.weight, self.head_norm.eps))

    def read_states(self, inputs: Sequence[Tensor]) -> Tensor:
        step, (before, states), (mixed, gates) = context(), self.bound_states(), inputs
        mixed = ops.causal_conv(mixed, self.conv1d.weight, None, before, step, "silu")
        return ops.gated_delta(
            mixed,
            gates,
            self.speeds,
            self.shifts,
            states,
            step,
            self.key_heads.length,
            self.spec.takes_turns,
            self.spec.most_rate,
        )


def _key_heads_of(values: Span, count: int) -> Span:
    """The key heads, of `count`, of these value heads, which take turns: several ranks may hold the same."""
    held = min(count, values.length)
    if count % held or values.length % held:
        raise ValueError(
            f"--tensor-parallel-size: the {values.length} value heads of linear attention of a rank cannot "
            f"take turns of {count} key heads, as in this GGUF file; choose a power of two"
        )
    start = values.start % count
    return Span(count, start, start + held)


@dataclass(frozen=True, kw_only=True)
class ChannelDeltaSpec:
    """The sizes of a layer of Kimi delta attention."""

    heads: int
    head_dim: int
    """The width of keys and values, and of what gates are projected from."""
    taps: int
    eps: float

    def build(self, hidden_size: int, parallel: Parallel) -> ChannelDelta:
        return ChannelDelta(hidden_size, self, parallel)


class ChannelDelta(StateLayer):
    """The heads of one layer that this rank holds: hidden states [T, hidden_size] -> [T, hidden_size].

    Each number of a key forgets by a gate of its own. Gates are projected from short vectors, which all ranks
    have.
    """

    def __init__(self, hidden_size: int, spec: ChannelDeltaSpec, parallel: Parallel) -> None:
        super().__init__()
        self.spec = spec
        self.heads = parallel.share(spec.heads, "heads of linear attention")
        self.inner, short = self.heads.times(spec.head_dim), Span.whole(spec.head_dim)
        mixed = [self.inner] * 3
        self.qkv_proj = Linear(hidden_size, mixed, sources=("q_proj", "k_proj", "v_proj"))
        self.gates_proj = Linear(
            hidden_size, [self.heads, short, short], sources=("b_proj", "f_a_proj", "g_a_proj"), plain=True
        )
        self.f_b_proj = Linear(spec.head_dim, self.inner, plain=True)
        self.g_b_proj = Linear(spec.head_dim, self.inner, plain=True)
        self.conv1d = Convolution(mixed, spec.taps, sources=("q_conv1d", "k_conv1d", "v_conv1d"))
        self.o_norm = RMSNorm(spec.head_dim, spec.eps)
        self.o_proj = RowLinear(self.inner, hidden_size, parallel)

    def pull(self, weights: Weights) -> None:
        load_children(self, weights)
        rates = weights.take("A_log", [1, 1, self.heads.size, 1], dtype=torch.float32).flatten()
        self.speeds = frozen(-rates[self.heads.start : self.heads.stop].exp())
        self.shifts = frozen(weights.take("dt_bias", [self.inner.size], cut_of(0, self.inner), torch.float32))

    def state_shapes(self) -> list[tuple[int, ...]]:
        dim = self.spec.head_dim
        return [self.conv1d.state_shape(), (self.heads.length, dim, dim)]

    def input_widths(self) -> list[int]:
        return [3 * self.inner.length, self.heads.length, self.inner.length]

    def read_states(self, inputs: Sequence[Tensor]) -> Tensor:
        step, (before, states), (mixed, rates, decays) = context(), self.bound_states(), inputs
        mixed = ops.causal_conv(mixed, self.conv1d.weight, None, before, step, "silu")
        return ops.channel_delta(mixed, rates, decays, self.speeds, self.shifts, states, step)

    def forward(self, x: Tensor) -> Tensor:
        rates, decays, gates = self.gates_proj(x).split(self.gates_proj.widths, dim=-1)
        inputs = self.qkv_proj(x), rates, self.f_b_proj(decays)
        gates = self.g_b_proj(gates)
        self.keep_guesses(inputs)
        out = self.read_states(inputs)
        return self.o_proj(ops.gated_norm(out, gates, self.o_norm.weight, self.o_norm.eps, "sigmoid"))


def _by_key_head(
    hidden_size: int, heads: Span, each: Interleaved, source: str, *, plain: bool = False
) -> Linear:
    rows = heads.times(sum(each.widths))
    return Linear(hidden_size, [rows], sources=(source,), orders=(each,), plain=plain)
