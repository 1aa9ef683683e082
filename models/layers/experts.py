"""The packed matrices of a layer's experts, and how a checkpoint may store them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.layers.expert_transport import ApartTransport, sum_over_replicas
from models.layers.linear import cut_of, frozen
from models.ops.expert_routing_ops import WITHOUT_GATES
from models.ops.grouped_matrix import Grouped, Matrix
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span
from models.quantization.matrices import has_matrix, read_matrix
from models.quantization.readers.fp8_mxfp4 import BLOCKS, read_member
from models.weight_slices import Cut

ReadParts = Callable[[int], list[Matrix]]
ReadMatrix = Callable[[int], Matrix]
"""The types of functions that read matrices of the expert with a number."""


@dataclass(frozen=True, kw_only=True)
class SavedExperts:
    """The names of experts in a checkpoint: a module for each matrix of each expert, or a tensor for all.

    The same family may be saved in both ways; what the checkpoint has is read.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    all_gate_up: str = "experts.gate_up_proj"
    """The tensor [E, 2I, H] of all gates and ups, and then that of all downs [E, H, I]."""
    all_down: str = "experts.down_proj"
    in_one: bool = False
    """Whether a checkpoint of which nothing is known has one tensor for all."""
    transposed: bool = False
    """Whether a tensor for all stores its matrices as [inputs, outputs].

    Some tools turn them; where the shape says so, they are read as [outputs, inputs]."""
    interleaved: bool = False
    """Whether gates and ups take turns in a tensor for all, which else has the gates of an expert first."""


class Experts(nn.Module):
    """The experts of a layer: this rank holds a piece of the inner width of all, or some of them whole."""

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    places: Tensor | None
    """The places of all experts [E] among those that this rank holds; None if it holds a piece of each."""
    apart: ApartTransport | None
    """What brings tokens to experts and their results back one by one; None if ranks return sums."""

    def __init__(
        self,
        size: int,
        inner: int,
        count: int,
        parallel: Parallel,
        *,
        kind: str,
        saved: SavedExperts,
        biased: bool = False,
    ) -> None:
        super().__init__()
        self.size = size
        self.count = count
        if parallel.experts is None:
            self.share = parallel.share(inner, "features of an expert")
            self.numbers = list(range(count))
        else:
            self.share = Span.whole(inner)
            self.numbers = parallel.experts.numbers(count)
        self.parallel = parallel
        self.kind = kind
        self.saved = saved
        self.biased = biased

    def pull(self, weights: Weights) -> None:
        """Read the experts of this rank; `weights` is the scope of the layer's mixture."""
        in_one = self._is_in_one(weights)
        gate_up_of, down_of = (self._in_one if in_one else self._apart)(weights)
        sections = self.parallel.sections(self.share)
        gated = self.kind not in WITHOUT_GATES
        gate_up = self._each(weights, lambda number: frozen(ops.pack(*gate_up_of(number), gated=gated)))
        down = self._each(weights, lambda number: frozen(ops.pack(down_of(number), sections=sections)))
        self.matrices = nn.ParameterList([*gate_up, *down])  # so that they are counted
        self.gate_up, self.down = ops.collect_experts(gate_up), ops.collect_experts(down)
        biases = (None, None)
        if self.biased:
            biases = (self._biases_in_one if in_one else self._biases_apart)(weights)
        self.gate_up_bias, self.down_bias = biases
        self.places = self.apart = None
        if (place := self.parallel.experts) is None:
            return
        if place.transport == "all_to_all":
            self.apart = ApartTransport(place, self.parallel, self.count, weights.device)
        else:
            self.places = self._find_places(weights.device)

    def _each(self, weights: Weights, make: Callable[[int], nn.Parameter]) -> list[nn.Parameter]:
        """Make a matrix of each expert of this rank. Where only shapes are read, the first stands for all."""
        if weights.device.type == "meta" and not weights.is_real:
            return [make(number) for number in self.numbers[:1]] * len(self.numbers)
        return [make(number) for number in self.numbers]

    def _find_places(self, device: torch.device) -> Tensor:
        places = torch.full((self.count,), -1, dtype=torch.int32)
        for place, number in enumerate(self.numbers):
            places[number] = place
        return places.to(device)

    def _is_in_one(self, weights: Weights) -> bool:
        """Whether the checkpoint has one tensor for the matrices of all experts."""
        name = self.saved.all_gate_up
        if weights.is_real:
            return name in weights or f"{name}{BLOCKS}" in weights
        return self.saved.in_one and not has_matrix(weights / f"experts.0.{self.saved.gate}")

    def _apart(self, weights: Weights) -> tuple[ReadParts, ReadMatrix]:
        """Functions that read the gate and the up of an expert, and its down, from modules of their own."""
        inner, saved = self.share, self.saved
        rows, columns = cut_of(0, inner), cut_of(1, inner)
        first = (saved.up,) if self.kind in WITHOUT_GATES else (saved.gate, saved.up)
        weights.ignore(*(f"experts.{number}" for number in range(self.count) if number not in self.numbers))

        def gate_up(number: int) -> list[Matrix]:
            scope = weights / f"experts.{number}"
            return [read_matrix(scope / name, (inner.size, self.size), rows) for name in first]

        def down(number: int) -> Matrix:
            scope = weights / f"experts.{number}"
            return read_matrix(scope / saved.down, (self.size, inner.size), columns)

        return gate_up, down

    def _in_one(self, weights: Weights) -> tuple[ReadParts, ReadMatrix]:
        """The same functions for tensors that hold the matrices of all experts, plain, in mxfp4 or in fp8."""
        inner, saved = self.share, self.saved
        turned = (self.count, 2 * inner.size, self.size)  # certainly [outputs, inputs], if it is not square
        is_turned = weights.stored_shape(saved.all_gate_up) == turned and turned[1] != turned[2]
        transposed = saved.transposed and not is_turned

        def read(name: str, shape: tuple[int, int], dim: int, start: int, stop: int, number: int) -> Matrix:
            packed = read_member(weights, name, self.count, shape, Cut(dim, start, stop, number))
            if packed is not None:
                return packed
            if transposed:
                shape, dim = (shape[1], shape[0]), 1 - dim
            piece = weights.take(name, [self.count, *shape], Cut(dim, start, stop, number))
            return piece.t() if transposed else piece

        def gate_up(number: int) -> list[Matrix]:
            name, shape = saved.all_gate_up, (2 * inner.size, self.size)
            if saved.interleaved:
                both = read(name, shape, 0, 2 * inner.start, 2 * inner.stop, number)
                return [_every_second(both, 0), _every_second(both, 1)]
            starts = (inner.start, inner.size + inner.start)
            return [read(name, shape, 0, start, start + inner.length, number) for start in starts]

        def down(number: int) -> Matrix:
            return read(saved.all_down, (self.size, inner.size), 1, inner.start, inner.stop, number)

        return gate_up, down

    def _biases_apart(self, weights: Weights) -> tuple[nn.Parameter, nn.Parameter]:
        """Read the biases of experts here, [E, 2I] and [E, H], of which each module has its own."""
        inner, saved, numbers = self.share, self.saved, self.numbers

        def take(number: int, module: str, size: int, cut: Cut | None = None) -> Tensor:
            return (weights / f"experts.{number}.{module}").take("bias", [size], cut)

        gate, up = (
            torch.stack([take(number, module, inner.size, cut_of(0, inner)) for number in numbers])
            for module in (saved.gate, saved.up)
        )
        down = torch.stack([take(number, saved.down, self.size) for number in numbers])
        return frozen(torch.cat([gate, up], dim=1)), frozen(down)

    def _biases_in_one(self, weights: Weights) -> tuple[nn.Parameter, nn.Parameter]:
        """Read the biases of experts here, [E, 2I] and [E, H], which stand beside tensors for all experts."""
        inner, saved = self.share, self.saved

        def read(name: str, width: int, start: int, stop: int) -> Tensor:
            shape = [self.count, width]
            if len(self.numbers) == self.count:
                return weights.take(name, shape, Cut(1, start, stop))
            rows = [weights.take(name, shape, Cut(0, number, number + 1)) for number in self.numbers]
            return torch.cat(rows)[:, start:stop]

        name, width = f"{saved.all_gate_up}_bias", 2 * inner.size
        if saved.interleaved:
            both = read(name, width, 2 * inner.start, 2 * inner.stop)
            parts = [both[:, ::2], both[:, 1::2]]
        else:
            starts = (inner.start, inner.size + inner.start)
            parts = [read(name, width, start, start + inner.length) for start in starts]
        down = read(f"{saved.all_down}_bias", self.size, 0, self.size)
        return frozen(torch.cat(parts, dim=1)), frozen(down)

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """x [T, H] and what `route` chose for it -> [T, H]."""
        parallel = self.parallel
        if self.apart is not None:
            return self.apart(x, ids, shares, self._add_up).to(x.dtype)
        if parallel.replicas is None:
            total = self._add_up(x, ids, shares)
        else:
            total = sum_over_replicas(parallel.replicas, x, ids, shares, self._add_up)
        return parallel.all_reduce(total).to(x.dtype)

    def _add_up(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """Send rows through those of their experts that this rank holds, and add their results up."""
        parallel = self.parallel
        enters = parallel.rank == 0 or parallel.experts is not None  # each bias must enter the sum once
        bias = self.down_bias if enters else None
        return ops.experts(
            x,
            ids,
            shares,
            self.gate_up,
            self.down,
            self.kind,
            gate_up_bias=self.gate_up_bias,
            down_bias=bias,
            places=self.places,
            wide=self.apart is not None or parallel.adds_wide,
        )


def describe_experts(model: nn.Module) -> str:
    """A sentence for the log: how many experts are here, and what they and all else weigh; "" without any."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    if not layers:
        return ""
    first = layers[0]
    held = sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
    others = sum(parameter.nbytes for parameter in model.parameters()) - held
    if first.parallel.experts is None:
        piece = "" if first.share.is_whole else f", 1/{first.parallel.size} of the width of each,"
        which = f"{first.count} experts{piece}"
    else:
        which = f"{len(first.numbers)} of {first.count} experts"
    return (
        f"this worker holds {which} in each of its layers with experts ({len(layers)}): "
        f"{held / (1 << 20):,.0f} MiB, and {others / (1 << 20):,.0f} MiB of other weights"
    )


def _every_second(matrix: Matrix, first: int) -> Matrix:
    """Every second row, from the row `first` on."""
    return matrix.each(lambda rows: rows[first::2]) if isinstance(matrix, Grouped) else matrix[first::2]
