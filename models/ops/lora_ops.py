"""Adapters of a linear layer: rows that have one are changed before bias, activation and gate.

y = factor * (W x + B (A x)) + shift + bias. Rows without an adapter keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
    b: Tensor  # [rows, numbers], of any number type
    scale: float = 1.0

    def in_float32(self) -> Block:
        """The same with the scale in it, in memory of its own."""
        return replace(self, b=self.b.float() * self.scale, scale=1.0)


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """An adapter's matrices for a layer [out, in], of gate and up one above the other."""

    a: Tensor | None  # [numbers, in], of any number type; None: it has no matrices
    blocks: Sequence[Block]
    factor: Tensor | None = None  # [out] float32; None: 1
    shift: Tensor | None = None  # [out] float32; None: 0

    @property
    def nbytes(self) -> int:
        tensors = (self.a, self.factor, self.shift, *(block.b for block in self.blocks))
        return sum(each.nbytes for each in tensors if each is not None)


@dataclass(frozen=True, eq=False)
class Adaptable:
    """A layer that may have adapters."""

    weight: Tensor
    """Its matrix [outputs, inputs], as `pack` returned it."""
    inputs: int
    outputs: int
    scopes: int
    """The modules of a checkpoint whose outputs it has, each of which has a rank of its own."""
    pieces: int
    """The most pieces of its outputs that are made of other numbers A x than their neighbours."""
    embeds: bool = False
    """Whether it holds embeddings: its inputs are tokens, and `weight` is [inputs, outputs]."""


class PreparedAdapter(Protocol):
    """An adapter in the form of the device."""

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


class AdapterStore(Protocol):
    """The adapters of a model. `prepare` may run beside steps, the other methods run between two of them."""

    layers: Sequence[Any]
    """What `lora` takes of each layer."""

    def prepare(self, changes: Iterable[tuple[int, LayerAdapter]]) -> PreparedAdapter:
        """Lay out what an adapter changes of layers, which are told by their places."""
        ...

    def enter(self, number: int, prepared: Any) -> None:
        """Let steps compute with what was prepared, under a number that no adapter has."""
        ...

    def drop(self, number: int) -> None:
        """Give it up again, if it is there."""
        ...

    def bring(self, numbers: Iterable[int]) -> None:
        """Have these adapters where the next step reads them; 0 is none."""
        ...


@dataclass(frozen=True, eq=False)
class _Apart:
    """An adapter, of which each layer holds its own part."""

    parts: Sequence[tuple[LayerAdapters, PreparedAdapter]]

    @property
    def nbytes(self) -> int:
        return sum(prepared.nbytes for _, prepared in self.parts)


class HeldByLayers:
    """The store of layers that each hold their own part of adapters, always where steps read it."""

    def __init__(self, layers: Sequence[LayerAdapters]) -> None:
        self.layers = layers
        self._entered: dict[int, _Apart] = {}

    def prepare(self, changes: Iterable[tuple[int, LayerAdapter]]) -> _Apart:
        layers = ((self.layers[at], adapter) for at, adapter in changes)
        return _Apart([(layer, layer.prepare(adapter)) for layer, adapter in layers])

    def enter(self, number: int, prepared: _Apart) -> None:
        self._entered[number] = prepared
        for layer, part in prepared.parts:
            layer.enter(number, part)

    def drop(self, number: int) -> None:
        if number in self._entered:
            for layer, _ in self._entered.pop(number).parts:
                layer.drop(number)

    def bring(self, numbers: Iterable[int]) -> None:
        """Do nothing: all are there."""


@dataclass(frozen=True, eq=False)
class Added:
    """The sum that `lora` computes and `linear` adds, of one layer and step."""

    adapters: Any
    rows: AdapterRows
    products: Any  # A x, in the form of the device


class HeldAdapters:
    """The plain form, which every device can compute."""

    def __init__(self, device: torch.device) -> None:
        self.held: dict[int, LayerAdapter] = {}
        self._device = device

    def prepare(self, adapter: LayerAdapter) -> LayerAdapter:
        device = self._device
        blocks = [block.in_float32() for block in adapter.blocks]
        return LayerAdapter(
            None if adapter.a is None else adapter.a.to(device, torch.float32, copy=True),  # files are mapped
            [replace(block, b=block.b.to(device)) for block in blocks],
            None if adapter.factor is None else adapter.factor.to(device),
            None if adapter.shift is None else adapter.shift.to(device),
        )

    def enter(self, number: int, prepared: LayerAdapter) -> None:
        self.held[number] = prepared

    def drop(self, number: int) -> None:
        self.held.pop(number, None)


def hold_adapters(layers: Sequence[Adaptable], most: int, rank: int, in_step: int) -> AdapterStore:
    """Make the store of the adapters of these layers.

    They are numbered 1 to `most`, up to `in_step` of which are in a step, and have up to this rank.
    """
    return HeldByLayers([HeldAdapters(layer.weight.device) for layer in layers])


def lora(x: Tensor, adapters: Any, rows: AdapterRows) -> Added:
    """Multiply rows of x [T, in] that have an adapter by its matrix A."""
    products: dict[int, Tensor] = {}
    for number, start, count in rows.host:
        adapter: LayerAdapter | None = adapters.held.get(number)
        if adapter is not None and adapter.a is not None:
            products[start] = x[start : start + count].float() @ adapter.a.t()
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
        total = _changed(product(x[start : start + count]).float(), adapter, added.products.get(start))
        total = total if bias is None else total + bias
        out[start : start + count] = finish(total.to(x.dtype)).to(out.dtype)
    return out


def adapt_embeddings(embedded: Tensor, ids: Tensor, adapters: Any, rows: AdapterRows) -> Tensor:
    """Change, in place, the embeddings [T, size] of tokens that have an adapter."""
    for number, start, count in rows.host:
        adapter: LayerAdapter | None = adapters.held.get(number)
        if adapter is not None:
            own = slice(start, start + count)
            low = None if adapter.a is None else adapter.a[:, ids[own]].t()
            embedded[own] = _changed(embedded[own].float(), adapter, low).to(embedded.dtype)
    return embedded


def _changed(total: Tensor, adapter: LayerAdapter, low: Tensor | None) -> Tensor:
    """Sums [T, out] float32 as an adapter changes them. `low` [T, numbers]: A x, if there is an A."""
    for block in adapter.blocks:
        assert low is not None
        products = low[:, block.first : block.first + block.b.shape[1]] @ block.b.t()
        total[:, block.start : block.start + len(block.b)] += products
    total = total if adapter.factor is None else total * adapter.factor
    return total if adapter.shift is None else total + adapter.shift
