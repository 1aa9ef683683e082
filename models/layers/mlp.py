"""The feed-forward blocks of layers, plain and gated, and the names of activations."""

from __future__ import annotations

from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.layers.linear import GatedLinear, Linear, RowLinear, frozen
from models.parallel.parallel import Parallel
from models.quantization.matrices import has_matrix

_KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}


def activation_kind(name: str) -> str:
    """The name that `ops.activation` has for an activation that config.json names."""
    if name not in _KINDS:
        raise ValueError(f"config.json names the activation {name!r}; there are {', '.join(_KINDS)}")
    return _KINDS[name]


def gate_kind(name: str) -> str:
    """The name that `ops.gated` has for an activation of gates: gpt-oss has one that is nothing else."""
    return name if name == "clamped" else activation_kind(name)


class MLP(nn.Module):
    """Two linear layers with an activation between; `names` are theirs in the checkpoint."""

    def __init__(
        self,
        size: int,
        inner: int,
        parallel: Parallel,
        *,
        activation: str,
        names: tuple[str, str],
        bias: bool,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        share = parallel.share(inner, "features of the MLP")
        self.learned = LearnedActivation() if activation == "xielu" else None
        kind = None if self.learned else activation_kind(activation)
        self.names = names
        self.inner = Linear(size, share, bias=bias, transposed=transposed, activation=kind)
        self.outer = RowLinear(share, size, parallel, bias=bias, transposed=transposed)

    def pull(self, weights: Weights) -> None:
        for layer, name in zip((self.inner, self.outer), self.names, strict=True):
            load(layer, weights / name)
        if self.learned is not None:
            load(self.learned, weights / "act_fn")

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        return self.outer(inner if self.learned is None else self.learned(inner))


class LearnedActivation(nn.Module):
    """The activation xIELU, which has learned the factors of its two curves."""

    ignored = ("beta", "eps")  # numbers that are the same in all checkpoints

    curves: nn.Parameter  # [2] float32

    def pull(self, weights: Weights) -> None:
        square, exponential = (
            F.softplus(weights.take(name, [1], dtype=torch.float32)) for name in ("alpha_p", "alpha_n")
        )
        self.curves = frozen(torch.cat([square, exponential + 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return ops.xielu(x, self.curves)


GATE_AND_UP = ("gate_proj", "up_proj")


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). The checkpoint holds gate and up apart, as `sources`, or as one.

    `names` are those of both in one and of down; `up_first` says that the one has up ahead of gate. With
    `names` and `sources`, what the checkpoint has is read.
    """

    def __init__(
        self,
        size: int,
        inner: int,
        parallel: Parallel,
        *,
        activation: str,
        bias: bool = False,
        down_bias: bool | None = None,
        sources: tuple[str, ...] = (),
        names: tuple[str, str] | None = None,
        up_first: bool = False,
    ) -> None:
        super().__init__()
        share = parallel.share(inner, "features of the MLP")
        kind = activation_kind(activation)
        self.names = names or ("gate_up_proj", "down_proj")
        self.may_be_in_one = names is not None
        self.gate_up_proj = GatedLinear(
            size, share, activation=kind, bias=bias, sources=sources, up_first=up_first
        )
        self.down_proj = RowLinear(share, size, parallel, bias=bias if down_bias is None else down_bias)

    def pull(self, weights: Weights) -> None:
        sources = self.gate_up_proj.sources
        if self.may_be_in_one and sources and not has_matrix(weights / sources[0]):
            self.gate_up_proj.sources = ()
        for layer, name in zip((self.gate_up_proj, self.down_proj), self.names, strict=True):
            load(layer, weights / name)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x))


class SparseMLP(nn.Module):
    """A gated MLP that closes the gates of a token below a bound, taken from their mean and deviation.

    About the part `sparsity` of them is closed, and the bound is taken off the others.
    """

    def __init__(
        self, size: int, inner: int, parallel: Parallel, *, activation: str, sparsity: float
    ) -> None:
        super().__init__()
        share = parallel.share(inner, "features of the MLP")
        self.gate_up_proj = Linear(size, [share, share], sources=GATE_AND_UP)
        self.down_proj = RowLinear(share, size, parallel)
        self.inner, self.parallel, self.sections = inner, parallel, parallel.sections(share)
        self.kind = activation_kind(activation)
        self.deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        centred = gate.float() - self._mean(ops.sum_rows(gate, self.sections))
        deviation = self._mean(ops.sum_squares(centred, self.sections)).sqrt()
        opened = F.relu(centred - self.deviations * deviation).to(x.dtype)
        return self.down_proj(ops.gate(up, opened, self.kind))

    def _mean(self, sums: Tensor) -> Tensor:
        """The mean over all ranks' features, of this rank's sums [T, 1]."""
        return self.parallel.all_reduce(sums) / self.inner
