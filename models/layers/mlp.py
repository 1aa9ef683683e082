"""The gated feed-forward block of all Llama-like models, and the names of activations."""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.linear import GatedLinear, RowLinear
from models.parallel.parallel import Parallel

_KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def activation_kind(name: str) -> str:
    """The name that `ops.activation` has for an activation that config.json names."""
    if name not in _KINDS:
        raise ValueError(f"config.json names the activation {name!r}; there are {', '.join(_KINDS)}")
    return _KINDS[name]


def gate_kind(name: str) -> str:
    """The name that `ops.gated` has for an activation of gates: gpt-oss has one that is nothing else."""
    return name if name == "clamped" else activation_kind(name)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). The checkpoint holds gate and up apart or, if `fused`, as one."""

    def __init__(
        self, size: int, inner: int, parallel: Parallel, *, activation: str, bias: bool, fused: bool
    ) -> None:
        super().__init__()
        share = parallel.share(inner, "features of the MLP")
        sources = () if fused else ("gate_proj", "up_proj")
        self.gate_up_proj = GatedLinear(
            size, share, activation=activation_kind(activation), bias=bias, sources=sources
        )
        self.down_proj = RowLinear(share, size, parallel, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x))
