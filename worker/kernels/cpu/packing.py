"""Matrices in panels, as `csrc/weights.h` lays them out: plain, quantized here, or quantized before."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from models.ops import block_codes, reference
from models.ops.block_codes import BitPlane
from models.ops.grouped_matrix import Grouped, Matrix, alike, widen, with_input_bits
from models.weight_coding import E2M1, E4M3, FP4, IQ4, NF4, UNROUNDED, WHOLE
from worker.host.memory import Arena, huge_pages
from worker.kernels.cpu.library import Library
from worker.kernels.cpu.quantization import HEAD, UNITS, Scheme
from worker.kernels.cpu.tensors import BFLOAT16, FLOAT32, KINDS, address, check_sections, refuse
from worker.kernels.cpu.torch_operations import linear_operations

logger = logging.getLogger(__name__)

SCALE_KINDS = {**KINDS, torch.float16: 2, torch.float8_e8m0fnu: 3, torch.uint8: 4, torch.int8: 5}
"""The number types of scales, and of minimums and factors: `scale` in `csrc/weights.h`."""
CODES = (WHOLE, E4M3, E2M1, IQ4, NF4, FP4)
"""The kinds of codes: `codes` in `csrc/weights.h`."""

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
        ("codes", ctypes.c_int),
        ("scale", ctypes.c_int),
        ("offsets", ctypes.c_int),
        ("minimums", ctypes.c_int),
        ("run", ctypes.c_int),
        ("factor", ctypes.c_int),
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
        ("minimums", ctypes.c_void_p),
        ("factors", ctypes.c_void_p * 2),
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
    read: object
    """The tensors that `fill` reads by their addresses, which must live until then."""
    dtype: torch.dtype
    inputs: int
    bytes_before: int
    order: Tensor | None = None


class Kept(Protocol):
    """Memory of matrices that an earlier load has packed, in the same order."""

    def find(self, form: bytes, nbytes: int) -> Tensor | None:
        """The memory of the next matrix, which is described so; None if it has to be packed."""
        ...

    def add(self, form: bytes, memory: Tensor) -> None:
        """Note a matrix that was packed."""
        ...


kept: ContextVar[Kept | None] = ContextVar("kept", default=None)
"""The matrices of an earlier load, which this thread need not pack again."""


def word_splitter(library: Library) -> Callable[..., Tensor]:
    """`split_words` for `models.ops.use`."""
    split = library.function("split_words")

    def split_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
        if words.is_meta:
            return words.new_empty(len(words), words.shape[1] * 32 // bits, dtype=torch.uint8)
        known = bits == 4 or (bits == 8 and order is None)
        if not known or words.dtype != torch.int32 or words.device.type != "cpu":
            return reference.split_words(words, bits, order)
        rows, columns = len(words), words.shape[1] * 32 // bits
        codes = huge_pages(rows * columns).view(rows, columns)  # small pages take longer to make than to fill
        places = bytes(range(8) if order is None else order)
        split(words.data_ptr(), *words.stride(), *words.shape, bits, places, codes.data_ptr())
        return codes

    return split_words


def block_splitter(library: Library) -> Callable[..., Tensor]:
    """`split_blocks` for `models.ops.use`."""
    split = library.function("split_blocks")

    def split_blocks(blocks: Tensor, count: int, planes: Sequence[BitPlane], flipped: int = 0) -> Tensor:
        rows, per_row, nbytes = blocks.shape
        if blocks.device.type != "cpu" or blocks.stride()[1:] != (nbytes, 1):
            return block_codes.split_blocks(blocks, count, planes, flipped)
        codes = huge_pages(rows * per_row * count).view(rows, per_row * count)
        told = torch.tensor([(plane.place, plane.bits, plane.span) for plane in planes])
        sizes = blocks.stride(0), *blocks.shape, count
        split(blocks.data_ptr(), *sizes, told.data_ptr(), len(planes), flipped, codes.data_ptr())
        return codes

    return split_blocks


class Packer:
    """`pack` for `models.ops.use`."""

    def __init__(self, library: Library, scheme: Scheme | None, input_bits: int | None = None) -> None:
        """`scheme`: how all matrices are quantized; None keeps each as it is, but for `input_bits`."""
        self._scheme = scheme
        self._input_bits = input_bits
        self._by_torch: Callable[..., Tensor] = linear_operations(scheme, input_bits)["pack"]
        self._size = library.function("packed_bytes")
        self._fill = library.function("pack")
        self._quantize = library.function("pack_quantized")
        self._keep = library.function("pack_grouped")
        self._arena = Arena()
        self._told: set[tuple[int, int]] = set()

    def __call__(
        self,
        *parts: Matrix,
        gated: bool = False,
        wide: bool = False,
        sections: int | None = None,
        plain: bool = False,
    ) -> Tensor:
        check_sections("pack", sections or 1)
        if self._scheme is not None:
            parts = tuple(widen(part) for part in parts)
        else:
            parts = tuple(with_input_bits(part, self._input_bits) for part in parts)
        plans = None
        places = ("cpu", "meta") if kept.get() is not None else ("cpu",)
        if all(part.dtype in KINDS and part.device.type in places for part in parts):
            scheme = None if plain else HEAD if wide and self._scheme is not None else self._scheme
            plans = self._plans(parts, gated, scheme, sections)
        if plans is None:
            return self._by_torch(*parts, gated=gated, wide=wide, sections=sections, plain=plain)
        memory, packed = self._filled(plans)
        return packed[0] if len(packed) == 1 else _joined(packed, memory)

    def as_they_are(self, *matrices: Tensor) -> tuple[Tensor, list[Packed]]:
        """Pack matrices of any sizes, none of them quantized; -> the memory of all, and each."""
        return self._filled([self._plan_plain([matrix], False, None, 1) for matrix in matrices])

    def alone(self, matrix: Tensor) -> Packed:
        """Pack a matrix of any size, not quantized, into memory that is freed with it."""
        plan = self._plan_plain([matrix], False, None, 1)
        size = self._size(ctypes.addressof(plan.described))
        packed = _packed(plan, torch.empty(size, dtype=torch.uint8))
        plan.fill(packed.address)
        return packed

    def rows_alone(self, matrix: Tensor) -> Packed:
        """Lay out a matrix [outputs, inputs] as a row of outputs for each input, in memory of its own."""
        plan = self._plan_plain([matrix], False, None, 1)
        rows = matrix.t().flatten()  # which one row gives its usual stride, and contiguous() does not
        return _packed(plan, rows.view(torch.uint8))

    def _filled(self, plans: Sequence[_Plan]) -> tuple[Tensor, list[Packed]]:
        """Pack what is planned into one piece of memory."""
        sizes = [self._size(ctypes.addressof(plan.described)) for plan in plans]
        form = b"".join(_form(plan) for plan in plans)
        earlier = kept.get()
        found = None if earlier is None else earlier.find(form, sum(sizes))
        memory = self._arena.take(sum(sizes)) if found is None else found
        packed = [_packed(plan, piece) for plan, piece in zip(plans, memory.split(sizes), strict=True)]
        if found is None:
            for plan, matrix in zip(plans, packed, strict=True):
                plan.fill(matrix.address)
            if earlier is not None:
                earlier.add(form, memory)
        return memory, packed

    def _plans(
        self, parts: Sequence[Matrix], gated: bool, scheme: Scheme | None, sections: int | None
    ) -> list[_Plan] | None:
        """Plan one matrix, or one for each part if their forms differ; None if kernels know no such form."""
        if _all_plain(parts):
            return [self._plan_plain(parts, gated, scheme, sections or 1)]
        if _all_grouped(parts) and all(alike(parts[0], part) for part in parts):
            count = None if parts[0].order is not None else sections
            fitted = [self._fitted(part, count) for part in parts]
            return [self._plan_grouped(fitted, gated, count or 1)] if _is_known(fitted[0]) else None
        alone = [self._plans([part], False, scheme, sections) for part in parts]
        return None if None in alone else [plan for plans in alone for plan in plans or ()]

    def _plan_plain(
        self, parts: Sequence[Tensor], gated: bool, chosen: Scheme | None, sections: int
    ) -> _Plan:
        dtype, outputs, inputs = parts[0].dtype, sum(map(len, parts)), parts[0].shape[1]
        fits = all(part.shape[1:] == (inputs,) and part.dtype == dtype for part in parts)
        if not fits or (gated and outputs % 2) or inputs % (2 * sections if sections > 1 else 1):
            refuse("pack", **{f"part {number}": part for number, part in enumerate(parts)})
        described = _Weights(None, outputs, inputs, KINDS[dtype], gated, sections, scale=BFLOAT16)
        if chosen is not None:
            described.bits, described.group = chosen.bits, chosen.group
            described.input_bits = chosen.input_bits
        held = [part.contiguous() for part in parts]
        matrix = (_Part * len(held))(*((part.data_ptr(), len(part)) for part in held))

        def fill(address: int) -> None:
            if chosen is None:
                self._fill(address, ctypes.addressof(matrix))
                return
            largest = (ctypes.c_float * len(chosen.largest))(*chosen.largest)
            self._quantize(address, ctypes.addressof(matrix), ctypes.addressof(largest), len(largest))

        return _Plan(described, fill, held, dtype, inputs, sum(part.nbytes for part in parts))

    def _plan_grouped(self, parts: Sequence[Grouped], gated: bool, sections: int) -> _Plan:
        first, outputs = parts[0], sum(map(len, parts))
        if gated and outputs % 2:
            refuse("pack", **{f"part {number}": part.codes for number, part in enumerate(parts)})
        order = None if first.order is None else first.order.int().contiguous()
        factors = first.factors
        described = _Weights(
            *(None, outputs, first.codes.shape[1], KINDS[first.dtype], gated, sections),
            *(first.bits, first.group, 16 if first.kind in UNROUNDED else first.input_bits),
            CODES.index(first.kind),
            scale=SCALE_KINDS[first.scales.dtype],
            offsets=any(part.offsets is not None for part in parts),
            minimums=first.minimums is not None,
            run=0 if factors is None else factors.run,
            factor=FLOAT32 if factors is None else SCALE_KINDS[factors.scales.dtype],
            order=None if order is None else order.data_ptr(),
        )
        held = [part.of([part.codes, *(x.contiguous() for x in part.tensors()[1:])]) for part in parts]
        matrix = (_GroupedPart * len(parts))(*(_grouped_part(part) for part in held))

        def fill(address: int) -> None:
            self._keep(address, ctypes.addressof(matrix))

        before = sum(part.plain_bytes for part in parts)
        return _Plan(described, fill, held, first.dtype, first.inputs, before, order)

    def _fitted(self, matrix: Grouped, sections: int | None) -> Grouped:
        """The same matrix as kernels read it: codes of 5 and 6 bits fill units, or become bytes."""
        fitted = matrix.in_groups(sections)
        bits, group = fitted.bits, fitted.group
        unit = UNITS.get(bits, 1)
        if group % unit == 0:
            return fitted
        if (bits, group) not in self._told:  # once, for such matrices are many
            self._told.add((bits, group))
            text = "codes of %d bits take 8 where groups have %d inputs: kernels read them in units of %d"
            logger.info(text, bits, group, unit)
        return fitted.in_bytes()


def described_in_one(matrices: Sequence[Packed]) -> ctypes.Array[_Weights]:
    """Copies of the descriptions of matrices, one after the other in memory."""
    return (_Weights * len(matrices))(*(matrix.described for matrix in matrices))


def _grouped_part(part: Grouped) -> tuple[Any, ...]:
    factors = () if part.factors is None else (part.factors.scales, part.factors.minimums)
    return (
        *(part.codes.data_ptr(), *part.codes.stride()),
        *(address(numbers) for numbers in (part.scales, part.offsets, part.minimums)),
        (ctypes.c_void_p * 2)(*(address(numbers) for numbers in factors)),
        len(part),
    )


def _form(plan: _Plan) -> bytes:
    """The description of a matrix without its addresses."""
    described = _Weights.from_buffer_copy(plan.described)
    described.order = None if plan.order is None else 1
    return bytes(described)


def _packed(plan: _Plan, memory: Tensor) -> Packed:
    """A matrix in this memory, which `plan.fill` has filled or is to fill."""
    described, packed = plan.described, Packed(memory, requires_grad=False)
    packed.described, packed.address = described, ctypes.addressof(described)
    packed.inputs, packed.outputs, packed.order, packed.apart = plan.inputs, described.outputs, plan.order, ()
    packed.columns = described.outputs // 2 if described.gated else described.outputs
    packed.numbers, packed.bytes_before = plan.dtype, plan.bytes_before
    described.panels = packed.data_ptr()
    return packed


def _joined(parts: list[Packed], memory: Tensor) -> Packed:
    """A matrix whose parts are computed one after the other."""
    whole, first = Packed(memory, requires_grad=False), parts[0]
    whole.described, whole.address, whole.order = first.described, first.address, None
    whole.inputs, whole.numbers, whole.apart = first.inputs, first.numbers, tuple(parts)
    whole.outputs = whole.columns = sum(part.outputs for part in parts)
    whole.bytes_before = sum(part.bytes_before for part in parts)
    return whole


def _is_known(matrix: Grouped) -> bool:
    """Whether kernels can read a form."""
    factors = matrix.factors
    return (
        matrix.group >= _LEAST_GROUP
        and (matrix.offsets is None or matrix.minimums is None)
        and (factors is None or factors.run.bit_count() == 1)
    )


def _all_plain(parts: Sequence[Matrix]) -> TypeGuard[Sequence[Tensor]]:
    return all(isinstance(part, Tensor) for part in parts)


def _all_grouped(parts: Sequence[Matrix]) -> TypeGuard[Sequence[Grouped]]:
    return all(isinstance(part, Grouped) for part in parts)
