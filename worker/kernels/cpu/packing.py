"""Matrices in panels on huge pages, as the C kernels read them: plain, quantized here, or quantized before.

`csrc/weights.h` says how a panel lies in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from models.quantization.coding import E4M3
from models.quantization.matrix import Grouped, Matrix, alike
from worker.host.memory import Arena
from worker.kernels.cpu.library import INT, LONG, POINTER, Library
from worker.kernels.cpu.portable import Table
from worker.kernels.cpu.quantized import HEAD, Scheme
from worker.kernels.cpu.shapes import refuse

FLOAT32, BFLOAT16 = 0, 1
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
"""The number types that kernels compute with: `kind` in `csrc/vec.h`."""
SCALE_KINDS = {**KINDS, torch.float16: 2}
"""The number types of scales: `scale` in `csrc/weights.h`."""

_LEAST_GROUP = 8


class _Weights(ctypes.Structure):
    """`weights` in `csrc/weights.h`."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("outputs", ctypes.c_long),
        ("inputs", ctypes.c_long),
        ("kind", ctypes.c_int),
        ("gated", ctypes.c_int),
        ("sections", ctypes.c_int),
        ("bits", ctypes.c_int),
        ("group", ctypes.c_int),
        ("input_bits", ctypes.c_int),
        ("scale", ctypes.c_int),
        ("offsets", ctypes.c_int),
        ("e4m3", ctypes.c_int),
        ("order", ctypes.c_void_p),
    ]


class _Part(ctypes.Structure):
    """`part` in `csrc/weights.h`."""

    _fields_ = [("first", ctypes.c_void_p), ("rows", ctypes.c_long)]


class _GroupedPart(ctypes.Structure):
    """`grouped_part` in `csrc/pack_grouped.c`."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("row_step", ctypes.c_long),
        ("column_step", ctypes.c_long),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("rows", ctypes.c_long),
    ]


class Packed(nn.Parameter):
    """A matrix [outputs, inputs] in panels: bytes that only the operations of `linear.py` can read."""

    described: _Weights
    address: int
    """The address of `described`."""
    inputs: int
    outputs: int
    columns: int
    """The width of a product: of a gated matrix, half its outputs."""
    numbers: torch.dtype
    bytes_before: int
    """The bytes of the matrix as it was loaded, or would be if it were not quantized."""
    order: Tensor | None
    """The order of the inputs that `described` points to."""
    apart: tuple[Packed, ...]
    """The parts of a matrix whose rows differ in form, one below the other; else there are none."""


@dataclass(frozen=True)
class _Plan:
    """A matrix that is to be packed: its description, without memory yet, and what fills that."""

    described: _Weights
    fill: Callable[[int], None]
    """A function that packs into the panels of the description at this address."""
    dtype: torch.dtype
    inputs: int
    bytes_before: int
    order: Tensor | None = None


class Packer:
    """`pack` for `models.ops.use`."""

    def __init__(self, library: Library, scheme: Scheme | None, other: Table) -> None:
        """`scheme`: how plain matrices are quantized. `other` packs what the kernels cannot read."""
        self._scheme = scheme
        self._other: Callable[..., Tensor] = other["pack"]
        self._size = library.function("packed_bytes", POINTER, result=LONG)
        self._fill = library.function("pack", POINTER, POINTER)
        self._quantize = library.function("pack_quantized", POINTER, POINTER, POINTER, INT)
        self._keep = library.function("pack_grouped", POINTER, POINTER)
        self._arena = Arena()

    def __call__(
        self, *parts: Matrix, gated: bool = False, wide: bool = False, sections: int | None = None
    ) -> Tensor:
        plans = None
        if all(part.dtype in KINDS and part.device.type == "cpu" for part in parts):
            plans = self._plans(parts, gated, wide, sections)
        if plans is None:
            return self._other(*parts, gated=gated, wide=wide, sections=sections)
        sizes = [self._size(ctypes.addressof(plan.described)) for plan in plans]
        memory = self._arena.take(sum(sizes))
        pieces = memory.split(sizes)
        packed = [_packed(plan, piece) for plan, piece in zip(plans, pieces, strict=True)]
        return packed[0] if len(packed) == 1 else _joined(packed, memory)

    def _plans(
        self, parts: Sequence[Matrix], gated: bool, wide: bool, sections: int | None
    ) -> list[_Plan] | None:
        """Plan one matrix, or one for each part if their forms differ; None if kernels know no such form."""
        if _all_plain(parts):
            return [self._plan_plain(parts, gated, wide, sections or 1)]
        if _all_grouped(parts) and all(alike(parts[0], part) for part in parts):
            count = None if parts[0].order is not None else sections
            fitted = [part.in_groups(count) for part in parts]
            return None if fitted[0].group < _LEAST_GROUP else [self._plan_grouped(fitted, gated, count or 1)]
        alone = [self._plans([part], False, wide, sections) for part in parts]
        return None if None in alone else [plan for plans in alone for plan in plans or ()]

    def _plan_plain(self, parts: Sequence[Tensor], gated: bool, wide: bool, sections: int) -> _Plan:
        dtype, outputs, inputs = parts[0].dtype, sum(map(len, parts)), parts[0].shape[1]
        fits = all(part.shape[1:] == (inputs,) and part.dtype == dtype for part in parts)
        if not fits or (gated and outputs % 2) or inputs % (2 * sections if sections > 1 else 1):
            refuse("pack", **{f"part {number}": part for number, part in enumerate(parts)})
        chosen = HEAD if wide and self._scheme is not None else self._scheme
        numbers = (0, 0, 0) if chosen is None else (chosen.bits, chosen.group, chosen.input_bits)
        described = _Weights(None, outputs, inputs, KINDS[dtype], gated, sections, *numbers, BFLOAT16)
        held = [part.contiguous() for part in parts]  # the plan holds them until they are read
        matrix = (_Part * len(held))(*((part.data_ptr(), len(part)) for part in held))

        def fill(address: int) -> None:
            if chosen is None:
                self._fill(address, ctypes.addressof(matrix))
                return
            largest = (ctypes.c_float * len(chosen.largest))(*chosen.largest)
            self._quantize(address, ctypes.addressof(matrix), ctypes.addressof(largest), len(largest))

        return _Plan(described, _holding(fill, held), dtype, inputs, sum(part.nbytes for part in parts))

    def _plan_grouped(self, parts: Sequence[Grouped], gated: bool, sections: int) -> _Plan:
        first, outputs = parts[0], sum(map(len, parts))
        if gated and outputs % 2:
            refuse("pack", **{f"part {number}": part.codes for number, part in enumerate(parts)})
        order = None if first.order is None else first.order.int().contiguous()
        described = _Weights(
            *(None, outputs, first.codes.shape[1], KINDS[first.dtype], gated, sections),
            *(first.bits, first.group, first.input_bits, SCALE_KINDS[first.scales.dtype]),
            *(any(part.offsets is not None for part in parts), first.kind == E4M3),
            None if order is None else order.data_ptr(),
        )
        held = [
            (p.codes, p.scales.contiguous(), None if p.offsets is None else p.offsets.contiguous())
            for p in parts
        ]
        matrix = (_GroupedPart * len(parts))(*(_grouped_part(*tensors) for tensors in held))

        def fill(address: int) -> None:
            self._keep(address, ctypes.addressof(matrix))

        before = sum(part.plain_bytes for part in parts)
        return _Plan(described, _holding(fill, held), first.dtype, first.inputs, before, order)


def _holding(fill: Callable[[int], None], held: object) -> Callable[[int], None]:
    """The same function, which keeps the tensors that it reads by their addresses."""

    def run(address: int, _held: object = held) -> None:
        fill(address)

    return run


def _grouped_part(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> tuple[int | None, ...]:
    first = None if offsets is None else offsets.data_ptr()
    return codes.data_ptr(), *codes.stride(), scales.data_ptr(), first, len(codes)


def _packed(plan: _Plan, memory: Tensor) -> Packed:
    described, packed = plan.described, Packed(memory, requires_grad=False)
    packed.described, packed.address = described, ctypes.addressof(described)
    packed.inputs, packed.outputs, packed.order, packed.apart = plan.inputs, described.outputs, plan.order, ()
    packed.columns = described.outputs // 2 if described.gated else described.outputs
    packed.numbers, packed.bytes_before = plan.dtype, plan.bytes_before
    described.panels = packed.data_ptr()
    plan.fill(packed.address)
    return packed


def _joined(parts: list[Packed], memory: Tensor) -> Packed:
    """A matrix whose parts are computed one after the other."""
    whole, first = Packed(memory, requires_grad=False), parts[0]
    whole.described, whole.address, whole.order = first.described, first.address, None
    whole.inputs, whole.numbers, whole.apart = first.inputs, first.numbers, tuple(parts)
    whole.outputs = whole.columns = sum(part.outputs for part in parts)
    whole.bytes_before = sum(part.bytes_before for part in parts)
    return whole


def _all_plain(parts: Sequence[Matrix]) -> TypeGuard[Sequence[Tensor]]:
    return all(isinstance(part, Tensor) for part in parts)


def _all_grouped(parts: Sequence[Matrix]) -> TypeGuard[Sequence[Grouped]]:
    return all(isinstance(part, Grouped) for part in parts)
