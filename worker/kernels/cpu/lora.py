"""Adapters by the C kernels: A is multiplied by `csrc/lora.c`, and B where `csrc/linear.c` ends a tile.

Kernels find the adapters of a layer in a table that stays where it is, by their numbers. So a recorded step
is right for all, and for those that come later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.context import AdapterRows
from models.ops import lora_ops
from models.ops.lora_ops import Adaptable, Added, Block, HeldAdapters, HeldByLayers, LayerAdapter
from worker.kernels.cpu.library import Library
from worker.kernels.cpu.packing import Packed, Packer
from worker.kernels.cpu.tensors import KINDS, address, empty
from worker.kernels.cpu.torch_operations import Table

_PANEL, _HALF = 32, 16


class _Adapted(ctypes.Structure):
    """`adapted` in `csrc/adapted.h`."""

    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("kind", ctypes.c_long),
    ]


class _Block(ctypes.Structure):
    """`block` in `csrc/lay_adapters.c`."""

    _fields_ = [
        ("b", ctypes.c_void_p),
        ("stride", ctypes.c_long),
        ("start", ctypes.c_long),
        ("rows", ctypes.c_long),
        ("first", ctypes.c_long),
        ("numbers", ctypes.c_long),
        ("kind", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True, eq=False)
class _Prepared:
    """An adapter of a layer as kernels read it: entries for tables of parts, and what they point to."""

    entries: Sequence[_Adapted]
    held: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.held)


Lay = Callable[[Sequence[Block], Tensor, torch.dtype], tuple[Tensor, Tensor]]
"""The type of a function that lays B out for rows [columns] int32, where -1 is none: its values for halves of
panels, and the range of numbers A x that each half is made of."""


class PackedAdapters:
    """The adapters of a layer whose matrix is in panels."""

    def __init__(self, packer: Packer, lay: Lay, layer: Adaptable, most: int, rank: int) -> None:
        self.numbers = layer.scopes * rank
        """The room for numbers A x of a token."""
        weight: Any = layer.weight
        self._dtype: torch.dtype = weight.numbers if type(weight) is Packed else weight.dtype
        rows = [_columns_in_panels(layer.outputs)] if layer.embeds else _parts_in_panels(weight)
        self._parts, self._lay = [each.int() for each in rows], lay
        self.tables = [(_Adapted * (most + 1))() for _ in self._parts]
        self.addresses = [ctypes.addressof(table) for table in self.tables]
        self._pack = packer.rows_alone if layer.embeds else packer.alone
        self._entered: dict[int, _Prepared] = {}

    def prepare(self, adapter: LayerAdapter) -> _Prepared:
        held: list[Tensor] = []
        entries: list[_Adapted] = []
        a = None if adapter.a is None else self._pack(adapter.a.to(self._dtype))
        if a is not None:
            if a.outputs > self.numbers:
                raise ValueError(f"an adapter has {a.outputs} numbers, and there is room for {self.numbers}")
            held.append(a)
        for rows in self._parts:
            entry = _Adapted(None if a is None else a.address, kind=KINDS[self._dtype])
            if adapter.blocks:
                b, ranges = self._lay(adapter.blocks, rows, self._dtype)
                entry.b, entry.ranges = b.data_ptr(), ranges.data_ptr()
                held += [b, ranges]
            for name, values, rest in (("factor", adapter.factor, 1.0), ("shift", adapter.shift, 0.0)):
                if values is not None:
                    laid = torch.cat([values.float(), torch.tensor([rest])])[rows]
                    setattr(entry, name, laid.data_ptr())
                    held.append(laid)
            entries.append(entry)
        return _Prepared(entries, held)

    def enter(self, number: int, prepared: _Prepared) -> None:
        self._entered[number] = prepared
        for table, entry in zip(self.tables, prepared.entries, strict=True):
            table[number] = entry

    def drop(self, number: int) -> None:
        for table in self.tables:
            table[number] = _Adapted()
        self._entered.pop(number, None)


def bind(library: Library, packer: Packer) -> Table:
    run, adapt = library.function("lora"), library.function("adapt_embeddings")
    lay = _layout(library)

    def hold_adapters(
        layers: Sequence[Adaptable], most: int, rank: int, in_step: int
    ) -> lora_ops.AdapterStore:
        return HeldByLayers(
            [
                PackedAdapters(packer, lay, layer, most, rank)
                if type(layer.weight) is Packed or (layer.embeds and layer.weight.dtype in KINDS)
                else HeldAdapters(layer.weight.device)
                for layer in layers
            ]
        )

    def lora(x: Tensor, adapters: PackedAdapters | HeldAdapters, rows: AdapterRows) -> Added:
        if isinstance(adapters, HeldAdapters):
            return lora_ops.lora(x, adapters, rows)
        stride, step = x.stride()
        if step != 1:
            x, stride = x.contiguous(), x.shape[1]
        low = empty((len(x), adapters.numbers), torch.float32)
        run(
            *(adapters.addresses[0], x.data_ptr(), stride, low.data_ptr(), adapters.numbers, len(x)),
            *(rows.runs.data_ptr(), KINDS[x.dtype]),
        )
        return Added(adapters, rows, low)

    def adapt_embeddings(
        embedded: Tensor, ids: Tensor, adapters: PackedAdapters | HeldAdapters, rows: AdapterRows
    ) -> Tensor:
        if isinstance(adapters, HeldAdapters):
            return lora_ops.adapt_embeddings(embedded, ids, adapters, rows)
        ids, (tokens, size) = ids.contiguous(), embedded.shape
        given = adapters.addresses[0], ids.data_ptr(), rows.numbers.data_ptr(), embedded.data_ptr()
        adapt(*given, tokens, size, KINDS[embedded.dtype])
        return embedded

    return {"hold_adapters": hold_adapters, "lora": lora, "adapt_embeddings": adapt_embeddings}


def adapted_linear(library: Library) -> Callable[..., None]:
    """The kernel of `linear` for a part of a layer with adapters: takes what that takes."""
    adapted = library.function("linear_adapted")

    def run(number: int, added: Added, *arguments: object) -> None:
        held: PackedAdapters = added.adapters
        low: Tensor = added.products
        adapted(
            *arguments,
            *(held.addresses[number], added.rows.numbers.data_ptr(), address(low), held.numbers),
        )

    return run


def _parts_in_panels(weight: Packed) -> list[Tensor]:
    """For each part of a matrix, the rows of the whole that its panels hold; -1 for none."""
    found, first = list[Tensor](), 0
    for part in weight.apart or (weight,):
        order = _rows_in_panels(part)
        found.append(torch.where(order < part.outputs, order + first, -1))
        first += part.outputs
    return found


def _columns_in_panels(size: int) -> Tensor:
    """The same of embeddings of some size."""
    columns = torch.arange(-(-size // _PANEL) * _PANEL)
    return torch.where(columns < size, columns, -1)


def _rows_in_panels(part: Packed) -> Tensor:
    """The rows of a matrix that the columns of its panels hold, one panel after the other; past the last row
    for columns that hold none."""
    half = _PANEL // 2 if part.described.gated else _PANEL
    columns = torch.arange(-(-part.columns // half) * half)
    rows = torch.where(columns < part.columns, columns, part.outputs).view(-1, half)
    if not part.described.gated:
        return rows.flatten()
    ups = torch.where(rows < part.columns, rows + part.columns, part.outputs)
    return torch.cat([rows, ups], dim=1).flatten()


def _layout(library: Library) -> Lay:
    find_ranges, fill = library.function("adapter_ranges"), library.function("lay_adapter")

    def lay(blocks: Sequence[Block], rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        stored = [block.b if block.b.dtype in KINDS else block.b.float() for block in blocks]
        stored = [b if b.stride(1) == 1 else b.contiguous() for b in stored]
        given = (_Block * len(blocks))(
            *(
                (
                    b.data_ptr(),
                    b.stride(0),
                    block.start,
                    len(b),
                    block.first,
                    b.shape[1],
                    KINDS[b.dtype],
                    block.scale,
                )
                for block, b in zip(blocks, stored, strict=True)
            )
        )
        halves = len(rows) // _HALF
        ranges = torch.empty(halves, 3, dtype=torch.int32)
        described = ctypes.addressof(given), len(blocks), rows.data_ptr(), halves, ranges.data_ptr()
        values = torch.empty(find_ranges(*described), _HALF, dtype=dtype)
        fill(*described, values.data_ptr(), KINDS[dtype])
        return values, ranges

    return lay
