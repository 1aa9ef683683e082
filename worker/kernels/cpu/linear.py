"""Linear layers by the C kernels: the operations that read the panels of `packing.py`.

`csrc/linear.c` says how they are computed with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker.kernels.cpu import experts, quantized
from worker.kernels.cpu.elementwise import GATES, activations
from worker.kernels.cpu.library import INT, LONG, POINTER, Library
from worker.kernels.cpu.packing import KINDS, Packed, Packer, word_splitter
from worker.kernels.cpu.portable import Table
from worker.kernels.cpu.quantized import Scheme
from worker.kernels.cpu.recording.outputs import empty
from worker.kernels.cpu.shapes import refuse


def bind(library: Library, scheme: Scheme | None = None) -> Table:
    """The operations that read packed matrices, for `models.ops.use`. `scheme`: how `pack` quantizes them."""
    other = quantized.table(scheme)
    linear = _linear(library, other)
    gated = activations(library)["gated"]

    def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        if type(weight) is not Packed:
            return other["gated_linear"](x, weight, bias, kind)
        if weight.apart:
            return gated(linear(x, weight, bias), kind)
        return linear(x, weight, bias, kind=kind)

    return {
        "split_words": word_splitter(library),
        "pack": Packer(library, scheme, other),
        "linear": linear,
        "gated_linear": gated_linear,
        **experts.bind(library, linear, gated_linear),
    }


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
        first = 0
        for part in weight.apart or (weight,):
            own_bias = None if bias is None else bias.data_ptr() + first * bias.itemsize
            run(
                *(part.address, x.data_ptr(), stride, own_bias, out.data_ptr() + first * out.itemsize),
                *(weight.columns, rows, KINDS[out.dtype], GATES[kind]),
            )
            first += part.columns
        return out

    return linear
