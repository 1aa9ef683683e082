"""Linear layers by the C kernels: weights in panels on huge pages, and the operations that read them.

`csrc/weights.h` says how a panel lies in memory, `csrc/linear.c` how it is computed with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from worker.host.memory import Arena
from worker.kernels.cpu import portable, quantized
from worker.kernels.cpu.library import INT, LONG, POINTER, Library
from worker.kernels.cpu.portable import Table
from worker.kernels.cpu.quantized import HEAD, Scheme
from worker.kernels.cpu.recording.outputs import empty
from worker.kernels.cpu.shapes import refuse

FLOAT32, BFLOAT16 = 0, 1
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
"""The number types that kernels compute with: `kind` in `csrc/vec.h`."""

FUNCTIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
"""The activations that kernels compute: `function` in `csrc/functions.h`."""


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
    ]


class _Part(ctypes.Structure):
    """`part` in `csrc/weights.h`."""

    _fields_ = [("first", ctypes.c_void_p), ("rows", ctypes.c_long)]


class Packed(nn.Parameter):
    """A matrix [outputs, inputs] in panels: bytes that only the operations of this module can read."""

    described: _Weights
    address: int
    """The address of `described`."""
    inputs: int
    outputs: int
    columns: int
    """The width of a product: of a gated matrix, half its outputs."""
    numbers: torch.dtype
    bytes_before: int
    """The bytes of the matrix as it was loaded."""


def bind(library: Library, scheme: Scheme | None = None) -> Table:
    """`pack`, `linear` and `gated_linear`, for `models.ops.use`. `scheme`: how `pack` quantizes matrices."""
    other = portable.TABLE if scheme is None else quantized.table(scheme)
    linear = _linear(library, other)

    def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        if type(weight) is not Packed:
            return other["gated_linear"](x, weight, bias, kind)
        return linear(x, weight, bias, kind=kind)

    return {"pack": _pack(library, scheme, other), "linear": linear, "gated_linear": gated_linear}


def _pack(library: Library, scheme: Scheme | None, other: Table) -> Callable[..., Tensor]:
    size = library.function("packed_bytes", POINTER, result=LONG)
    fill = library.function("pack", POINTER, POINTER)
    quantize = library.function("pack_quantized", POINTER, POINTER, POINTER, INT)
    arena = Arena()

    def pack(*parts: Tensor, gated: bool = False, wide: bool = False, sections: int | None = None) -> Tensor:
        dtype, device = parts[0].dtype, parts[0].device
        if dtype not in KINDS or device.type != "cpu":
            return other["pack"](*parts, gated=gated, wide=wide, sections=sections)
        outputs, inputs = sum(map(len, parts)), parts[0].shape[1]
        alike = all(part.shape[1:] == (inputs,) and part.dtype == dtype for part in parts)
        sections = sections or 1
        if not alike or (gated and outputs % 2) or inputs % (2 * sections if sections > 1 else 1):
            refuse("pack", **{f"part {number}": part for number, part in enumerate(parts)})
        chosen = scheme if scheme is None or not wide else HEAD
        numbers = (0, 0, 0) if chosen is None else (chosen.bits, chosen.group, chosen.input_bits)
        described = _Weights(None, outputs, inputs, KINDS[dtype], gated, sections, *numbers)
        address = ctypes.addressof(described)
        packed = Packed(arena.take(size(address)), requires_grad=False)
        packed.described, packed.address = described, address
        packed.inputs, packed.outputs = inputs, outputs
        packed.columns = outputs // 2 if gated else outputs
        packed.numbers, packed.bytes_before = dtype, sum(part.nbytes for part in parts)
        described.panels = packed.data_ptr()
        held = [part.contiguous() for part in parts]  # named, or they would be freed before they are read
        matrix = (_Part * len(held))(*((part.data_ptr(), len(part)) for part in held))
        if chosen is None:
            fill(address, ctypes.addressof(matrix))
        else:
            largest = (ctypes.c_float * len(chosen.largest))(*chosen.largest)
            quantize(address, ctypes.addressof(matrix), ctypes.addressof(largest), len(largest))
        return packed

    return pack


def _linear(library: Library, other: Table) -> Callable[..., Tensor]:
    run = library.function("linear", POINTER, POINTER, LONG, POINTER, POINTER, LONG, LONG, INT, INT)

    def linear(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kind: str | None = None, wide: bool = False
    ) -> Tensor:
        if type(weight) is not Packed:
            return other["linear"](x, weight, bias, kind=kind, wide=wide)
        rows, inputs = x.shape
        stride, step = x.stride()
        if inputs != weight.inputs or x.dtype != weight.numbers:
            raise ValueError(
                f"an input [T, {inputs}] of {x.dtype} does not fit a matrix with {weight.inputs} inputs of "
                f"{weight.numbers}"
            )
        if bias is not None:
            if bias.shape != (weight.outputs,) or bias.dtype != weight.numbers:
                refuse("linear", x=x, bias=bias)
            bias = bias.contiguous()
        if step != 1:
            x, stride = x.contiguous(), inputs
        out = empty((rows, weight.columns), torch.float32 if wide else x.dtype)
        run(
            *(weight.address, x.data_ptr(), stride, None if bias is None else bias.data_ptr()),
            *(out.data_ptr(), weight.columns, rows, KINDS[out.dtype], FUNCTIONS[kind]),
        )
        return out

    return linear
