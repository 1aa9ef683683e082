"""Linear layers: which tensors of the checkpoint each is made of, and which piece of them this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.context import context
from models.ops.grouped_matrix import Grouped, Matrix, halves, stacked
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span
from models.quantization.matrices import read_matrix
from models.weight_slices import Cut

Part = TypeVar("Part", Tensor, Matrix)


@dataclass(frozen=True)
class Pairs:
    """Heads whose rotation pairs neighbours: of the rows of each, `width` in number, the last `turned` do.

    With `leading` these are the first ones.
    """

    width: int
    turned: int
    leading: bool = False

    def order(self, rows: int) -> Tensor:
        """The order of so many rows in which the even ones of those that turn stand before the odd ones."""
        heads = torch.arange(rows).view(-1, self.width)
        if self.leading:
            turned, plain = heads.split([self.turned, self.width - self.turned], dim=1)
            return torch.cat([turned[:, ::2], turned[:, 1::2], plain], dim=1).flatten()
        plain, turned = heads.split([self.width - self.turned, self.turned], dim=1)
        return torch.cat([plain, turned[:, ::2], turned[:, 1::2]], dim=1).flatten()


@dataclass(frozen=True)
class Interleaved:
    """Heads that each have several kinds of rows, of these widths: they are brought together kind by kind."""

    widths: tuple[int, ...]

    def order(self, rows: int) -> Tensor:
        kinds = torch.arange(rows).view(-1, sum(self.widths)).split(self.widths, dim=1)
        return torch.cat([kind.flatten() for kind in kinds])


class RowOrder(Protocol):
    """The order in which rows of a stored matrix are wanted."""

    def order(self, rows: int) -> Tensor:
        """The numbers of so many stored rows, in the order in which they are wanted."""
        ...


@dataclass(frozen=True)
class Place:
    """The place of a layer's rows in a checkpoint."""

    scope: str
    rows: Span
    order: RowOrder | None

    def of(self, outputs: Tensor) -> Tensor:
        """These rows of what the scope has for each of its outputs."""
        return _ordered(outputs[self.rows.start : self.rows.stop], self.order)


class Linear(nn.Module):
    """Linear layer: x [T, in] -> [T, out], as much of the output as this rank holds.

    The output may consist of several parts, laid side by side and cut one by one: q, k and v; gate and up.
    The checkpoint has them in one tensor of the layer's own name, or, if `sources` names one for each part,
    in tensors beside it. `transposed` is for checkpoints that store [in, out]. `activation` is the kind of an
    activation that follows. `orders` has for each part the order in which its rows are wanted, if that is not
    theirs. With `plain` the matrix is not quantized while it is loaded. Neighbouring parts whose order is
    theirs may have the same source, in which they lie one above the other.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    places: Sequence[Place] = ()
    """The places in the checkpoint of the parts, one after the other, or of all as one part."""
    adapters: Any = None  # those that `ops.lora` takes; None: there can be none

    def __init__(
        self,
        inputs: Span | int,
        outputs: Span | int | Sequence[Span],
        *,
        bias: bool = False,
        sources: Sequence[str] = (),
        transposed: bool = False,
        activation: str | None = None,
        orders: Sequence[RowOrder | None] = (),
        plain: bool = False,
    ) -> None:
        super().__init__()
        self.inputs = _span(inputs)
        self.outputs = tuple(outputs) if isinstance(outputs, Sequence) else (_span(outputs),)
        if sources and len(sources) != len(self.outputs):
            raise ValueError(f"{len(self.outputs)} parts need as many sources, not {len(sources)}")
        if any(orders) and not sources:
            raise ValueError("parts whose rows are brought into another order need sources of their own")
        self.sources = tuple(sources)
        self.orders = tuple(orders) or (None,) * len(self.outputs)
        self.has_bias = bias
        self.transposed = transposed
        self.activation = activation
        self.plain = plain

    @property
    def widths(self) -> list[int]:
        """The widths of the parts of the output, as far as this rank holds them."""
        return [part.length for part in self.outputs]

    def pull(self, weights: Weights) -> None:
        self.weight = frozen(ops.pack(*self._matrices(weights), plain=self.plain))
        self.bias = self._pull_bias(weights)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias, kind=self.activation, **self.added(x))

    def added(self, x: Tensor) -> dict[str, Any]:
        """The option of the product that adds what adapters of the step's tokens do, if some have one."""
        if self.adapters is None or (rows := context().adapters) is None:
            return {}
        return {"added": ops.lora(x, self.adapters, rows)}

    def _matrices(self, weights: Weights) -> list[Matrix]:
        """Read the parts of the matrix by output, or all of it as one part."""
        self.places = [Place(scope.path, rows, order) for scope, rows, order in self._parts(weights)]
        return self._gather(weights, self._matrix)

    def _pull_bias(self, weights: Weights) -> nn.Parameter | None:
        return frozen(torch.cat(self._gather(weights, self._bias))) if self.has_bias else None

    def _gather(self, weights: Weights, read: Callable[[Weights, int, Span], Part]) -> list[Part]:
        """Read the parts of a matrix or bias by output, or all of it as one part."""
        return [_ordered(read(scope, rows.size, rows), order) for scope, rows, order in self._parts(weights)]

    def _parts(self, weights: Weights) -> Iterator[tuple[Weights, Span, RowOrder | None]]:
        """The scope of each part, its rows there, and their order."""
        if not self.sources:
            yield from ((weights, rows, None) for rows in stacked_spans(self.outputs))
            return
        described = zip(self.sources, self.outputs, self.orders, strict=True)
        for source, group in groupby(described, key=itemgetter(0)):
            scope, (_, spans, orders) = weights.sibling(source), zip(*group, strict=True)
            for rows, order in zip(stacked_spans(spans), orders, strict=False):
                yield scope, rows, order

    def _matrix(self, weights: Weights, size: int, rows: Span) -> Matrix:
        """Read the piece `rows` of a matrix with `size` outputs, and of it the piece of the inputs."""
        cut = cut_of(0, rows) or cut_of(1, self.inputs)  # never both: a layer is cut by column or by row
        return read_matrix(weights, (size, self.inputs.size), cut, transposed=self.transposed)

    def _bias(self, weights: Weights, size: int, rows: Span) -> Tensor:
        return weights.take("bias", [size], cut_of(0, rows))


class GatedLinear(Linear):
    """Gated linear layer: x [T, in] -> activation(gate) * up [T, out]. The output parts are gate and up."""

    def __init__(
        self,
        inputs: Span | int,
        outputs: Span,
        *,
        activation: str,
        bias: bool = False,
        sources: Sequence[str] = (),
        up_first: bool = False,
    ) -> None:
        """`up_first`: the checkpoint has up and gate in one matrix, in this order."""
        super().__init__(inputs, [outputs, outputs], bias=bias, sources=sources)
        self.kind = activation
        self.up_first = up_first

    def pull(self, weights: Weights) -> None:
        parts = self._matrices(weights)
        if self.up_first:
            parts = reversed(halves(stacked(parts)))
        self.weight = frozen(ops.pack(*parts, gated=True))
        self.bias = self._pull_bias(weights)

    def forward(self, x: Tensor) -> Tensor:
        return ops.gated_linear(x, self.weight, self.bias, self.kind, **self.added(x))


class RowLinear(Linear):
    """Linear layer after a cut one: each rank reads its piece of the input, and the results are added up.

    The sum over the inputs is made in sections and in float32, whoever has them, and rounded once.
    """

    def __init__(
        self,
        inputs: Span,
        outputs: int,
        parallel: Parallel,
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__(inputs, outputs, bias=bias, transposed=transposed)
        self.parallel = parallel

    def pull(self, weights: Weights) -> None:
        sections = self.parallel.sections(self.inputs)
        self.weight = frozen(ops.pack(*self._matrices(weights), sections=sections))
        self.bias = self._pull_bias(weights)

    def forward(self, x: Tensor) -> Tensor:
        added = self.added(x)
        if self.parallel.size == 1:
            return ops.linear(x, self.weight, self.bias, **added)
        if self.parallel.exact:
            total = self.parallel.all_reduce(ops.linear(x, self.weight, wide=True, **added))
            return (total if self.bias is None else total + self.bias).to(x.dtype)
        bias = self.bias if self.parallel.rank == 0 else None  # it must enter the sum once
        return self.parallel.all_reduce(ops.linear(x, self.weight, bias, **added))


def frozen(tensor: Tensor) -> nn.Parameter:
    """Make a parameter that is never trained. One that is a parameter stays the same object, so ties hold."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def _ordered(part: Part, wanted: RowOrder | None) -> Part:
    if wanted is None:
        return part
    order = wanted.order(len(part)).to(part.device)
    return part.at(order) if isinstance(part, Grouped) else part[order]


def stacked_spans(parts: Sequence[Span]) -> list[Span]:
    """The pieces of parts that lie one above the other, as pieces of all of them; one if all are whole."""
    size = sum(part.size for part in parts)
    if all(part.is_whole for part in parts):
        return [Span.whole(size)]
    starts = accumulate((part.size for part in parts), initial=0)
    return [
        Span(size, start + part.start, start + part.stop) for start, part in zip(starts, parts, strict=False)
    ]


def pieces_of(parts: Sequence[Span]) -> list[Cut | None]:
    """The cuts that read these pieces of a tensor in which the parts lie one after the other."""
    return [cut_of(0, rows) for rows in stacked_spans(parts)]


def _span(size: Span | int) -> Span:
    return size if isinstance(size, Span) else Span.whole(size)


def cut_of(dim: int, span: Span) -> Cut | None:
    """The cut that reads this piece of a dimension; None if it is all of it."""
    return None if span.is_whole else Cut(dim, span.start, span.stop)
