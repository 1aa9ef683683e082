"""Adapters of a linear layer: rows that have one are changed before bias, activation and gate.

y = factor * (W x + B (A x)) + shift + bias. Rows without an adapter keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from models.context import AdapterRows


@dataclass(frozen=True, eq=False)
class Block:
    """A part of the matrix B: some rows of a layer's output, made of some of the numbers A x."""

    start: int
    """The first row of the output."""
    first: int
    """The first of the numbers."""
    b: Tensor  # [rows, numbers] float32, with the scale in it


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """What an adapter changes of a layer with matrices [out, in], of gate and up one above the other."""

    a: Tensor | None  # [numbers, in]; None: it has no matrices
    blocks: Sequence[Block]
    factor: Tensor | None = None  # [out] float32; None: 1
    shift: Tensor | None = None  # [out] float32; None: 0

    @property
    def nbytes(self) -> int:
        tensors = (self.a, self.factor, self.shift, *(block.b for block in self.blocks))
        return sum(each.nbytes for each in tensors if each is not None)


class PreparedAdapter(Protocol):
    """An adapter of a layer in the form of the device."""

    @property
    def nbytes(self) -> int: ...


class LayerAdapters(Protocol):
    """The adapters of one layer."""

    def prepare(self, adapter: LayerAdapter) -> PreparedAdapter:
        """Lay an adapter out as steps read it. It may run in another thread, beside steps."""
        ...

    def enter(self, number: int, prepared: Any) -> None:
        """Let steps compute with what was prepared, under a number."""
        ...

    def drop(self, number: int) -> None:
        """Give it up again, if it is there."""
        ...


@dataclass(frozen=True, eq=False)
class Added:
    """What `lora` computes and `linear` adds, of one layer and step."""

    adapters: Any
    rows: AdapterRows
    products: Any  # A x, in the form of the device


class HeldAdapters:
    """The plain form, which every device can compute."""

    def __init__(self) -> None:
        self.held: dict[int, LayerAdapter] = {}

    def prepare(self, adapter: LayerAdapter) -> LayerAdapter:
        return adapter

    def enter(self, number: int, prepared: LayerAdapter) -> None:
        self.held[number] = prepared

    def drop(self, number: int) -> None:
        self.held.pop(number, None)


def hold_adapters(weight: Tensor, most: int, numbers: int) -> LayerAdapters:
    """Make the place for adapters of the layer with this packed matrix.

    They are numbered 1 to `most`, and have up to so many `numbers` A x.
    """
    return HeldAdapters()


def lora(x: Tensor, adapters: Any, rows: AdapterRows) -> Added:
    """Multiply rows of x [T, in] that have an adapter by its matrix A."""
    products: dict[int, Tensor] = {}
    for number, start, count in rows.host:
        adapter: LayerAdapter | None = adapters.held.get(number)
        if adapter is not None and adapter.a is not None:
            products[start] = x[start : start + count].float() @ adapter.a.float().t()
    return Added(adapters, rows, products)


def with_adapters(
    out: Tensor,
    x: Tensor,
    product: Callable[[Tensor], Tensor],
    bias: Tensor | None,
    finish: Callable[[Tensor], Tensor],
    added: Added,
) -> Tensor:
    """Write into `out` [T, F] the rows that have an adapter.

    `product` multiplies rows by the layer's matrix, and `finish` is what follows the bias.
    """
    for number, start, count in added.rows.host:
        adapter: LayerAdapter | None = added.adapters.held.get(number)
        if adapter is None:
            continue
        total = product(x[start : start + count]).float()
        for block in adapter.blocks:
            low = added.products[start][:, block.first : block.first + block.b.shape[1]]
            total[:, block.start : block.start + len(block.b)] += low @ block.b.t()
        for change, number_of in ((torch.mul, adapter.factor), (torch.add, adapter.shift), (torch.add, bias)):
            total = total if number_of is None else change(total, number_of)
        out[start : start + count] = finish(total.to(x.dtype)).to(out.dtype)
    return out
