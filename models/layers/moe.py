"""A mixture of experts in place of an MLP: a router, the experts it chooses from, and a shared one."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.layers.experts import Experts, SavedExperts
from models.layers.linear import Linear, frozen
from models.layers.mlp import GATE_AND_UP, MLP, GatedMLP, gate_kind
from models.ops.expert_routing_ops import WITHOUT_GATES, Routing
from models.parallel.parallel import Parallel
from models.quantization.matrices import read_plain_matrix


@dataclass(frozen=True)
class SharedExpert:
    """An MLP beside the experts, for all tokens, and its names in the checkpoint."""

    scope: str
    """The module's name within the mixture, or within the layer if `beside`."""
    width: int
    _: KW_ONLY
    beside: bool = False
    gate: str = ""
    """The matrix [1, H] that says by how much a token takes of it; "" means that all take all."""
    fused: tuple[str, str] | None = None
    """The modules of gate and up in one and of down, if it has such."""
    bias: bool = False
    """Whether one without gates has biases; others have none."""


@dataclass(frozen=True)
class NarrowExperts:
    """Experts that read fewer features than the layer has: one matrix takes them there, another one back."""

    size: int
    """The features that they read and write."""
    down: str
    """The module of the matrix to them, within the mixture."""
    up: str
    _: KW_ONLY
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """The mixture of experts of one layer, and its names in the checkpoint."""

    routing: Routing
    width: int
    """The inner features of an expert."""
    activation: str
    scope: str = "mlp"
    router: str = "gate"
    router_bias: bool = False
    correction: str = ""
    """The tensor that is added to scores for the choice alone; "" means that there is none."""
    factors: str = ""
    """The tensor of what the weights of each expert are multiplied with; "" means that there is none."""
    saved: SavedExperts = field(default_factory=SavedExperts)
    biased: bool = False
    """Whether experts have biases."""
    shared: SharedExpert | None = None
    narrow: NarrowExperts | None = None
    """What is said of experts that read fewer features than the layer has; None: they read all."""


class Router(nn.Module):
    """Chooses experts. It is computed in float32 and never quantized, and every rank has all of it."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    correction: nn.Parameter | None
    factors: nn.Parameter | None

    def __init__(self, size: int, spec: ExpertSpec) -> None:
        super().__init__()
        self.size = size
        self.spec = spec

    def pull(self, weights: Weights) -> None:
        """Read the router; `weights` is the scope of the layer's mixture."""
        spec, count = self.spec, self.spec.routing.experts
        scope = weights / spec.router
        matrix = read_plain_matrix(scope, (count, self.size), None, scope.dtype)
        self.weight = frozen(ops.pack(matrix, plain=True))
        self.bias = frozen(scope.take("bias", [count])) if spec.router_bias else None
        self.correction = None
        if spec.correction:
            stored = weights.stored_shape(spec.correction)
            shape = [1, count] if stored == (1, count) else [count]
            correction = weights.take(spec.correction, shape, dtype=torch.float32)
            self.correction = frozen(correction.reshape(count))
        self.factors = None
        if spec.factors:
            self.factors = frozen(weights.take(spec.factors, [count], dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the numbers of experts [T, k], and their weights."""
        return ops.route(x, self.weight, self.bias, self.correction, self.spec.routing, self.factors)


class MoeMLP(nn.Module):
    """x [T, H] -> what the chosen experts make of it, added up, and the shared one's part."""

    shared_gate: nn.Parameter | None

    def __init__(self, size: int, spec: ExpertSpec, parallel: Parallel) -> None:
        super().__init__()
        self.size = size
        self.spec = spec
        self.router = Router(size, spec)
        self.narrowed = self.widened = None
        if (narrow := spec.narrow) is not None:
            self.narrowed = Linear(size, narrow.size, bias=narrow.bias)
            self.widened = Linear(narrow.size, size, bias=narrow.bias)
        self.experts = Experts(
            narrow.size if narrow else size,
            spec.width,
            spec.routing.experts,
            parallel,
            kind=gate_kind(spec.activation),
            saved=spec.saved,
            biased=spec.biased,
        )
        self.shared = None
        if (shared := spec.shared) is not None:
            self.shared = _shared_mlp(size, shared, spec.activation, parallel)

    def pull(self, weights: Weights) -> None:
        scope = weights.sibling(self.spec.scope)
        self.router.pull(scope)
        self.experts.pull(scope)
        if (narrow := self.spec.narrow) is not None and self.narrowed and self.widened:
            load(self.narrowed, scope / narrow.down)
            load(self.widened, scope / narrow.up)
        self.shared_gate = None
        if (spec := self.spec.shared) is None or self.shared is None:
            return
        shared = (weights.sibling("") if spec.beside else scope) / spec.scope
        load(self.shared, shared)
        if spec.gate:
            self.shared_gate = frozen((scope / spec.gate).take("weight", [1, self.size])[0])

    def take_part(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compute what experts here make of the tokens of other replicas, in a step without own ones."""
        chosen = torch.empty(0, self.spec.routing.chosen, device=device)
        x = torch.empty(0, self.experts.size, dtype=dtype, device=device)
        self.experts(x, chosen.int(), chosen)

    def forward(self, x: Tensor) -> Tensor:
        read = x if self.narrowed is None else self.narrowed(x)
        routed = self.experts(read, *self.router(x))
        if self.widened is not None:
            routed = self.widened(routed)
        if self.shared is None:
            return routed
        shared = self.shared(x)
        if self.shared_gate is None:
            return ops.add(routed, shared)
        return ops.add_gated(x, shared, self.shared_gate, routed)


def _shared_mlp(size: int, shared: SharedExpert, activation: str, parallel: Parallel) -> MLP | GatedMLP:
    if gate_kind(activation) in WITHOUT_GATES:
        names = ("up_proj", "down_proj")
        return MLP(size, shared.width, parallel, activation=activation, names=names, bias=shared.bias)
    return GatedMLP(
        size, shared.width, parallel, activation=activation, sources=GATE_AND_UP, names=shared.fused
    )
