"""Linear layers by the C kernel of `csrc/linear.c`, which reads the panels of `packing.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models.ops.lora_ops import Added
from worker.kernels.cpu import experts, lora, torch_operations
from worker.kernels.cpu.library import Library
from worker.kernels.cpu.packing import Packed, Packer, block_splitter, word_splitter
from worker.kernels.cpu.quantization import Scheme
from worker.kernels.cpu.rowwise import GATES, activations
from worker.kernels.cpu.tensors import KINDS, empty, refuse
from worker.kernels.cpu.torch_operations import Table


def bind(library: Library, scheme: Scheme | None = None, input_bits: int | None = None) -> Table:
    """The operations that read packed matrices, for `models.ops.use`. `scheme`: how `pack` quantizes them;
    `input_bits`: bits to which inputs of matrices are rounded that are quantized already."""
    linear, packer = _linear(library), Packer(library, scheme, input_bits)
    gated = activations(library)["gated"]

    def gated_linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, *, added: Added | None = None
    ) -> Tensor:
        if type(weight) is not Packed:
            return torch_operations.gated_linear(x, weight, bias, kind, added=added)
        if weight.apart:
            return gated(linear(x, weight, bias, added=added), kind)
        return linear(x, weight, bias, kind=kind, added=added)

    return {
        "split_words": word_splitter(library),
        "split_blocks": block_splitter(library),
        "pack": packer,
        "linear": linear,
        "gated_linear": gated_linear,
        **lora.bind(library, packer),
        **experts.bind(library, linear, gated_linear),
    }


def _linear(library: Library) -> Callable[..., Tensor]:
    plain, adapted = library.function("linear"), lora.adapted_linear(library)

    def linear(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kind: str | None = None,
        wide: bool = False,
        added: Added | None = None,
    ) -> Tensor:
        if type(weight) is not Packed:
            return torch_operations.linear(x, weight, bias, kind=kind, wide=wide, added=added)
        rows, inputs = x.shape
        stride, step = x.stride()
        if inputs != weight.inputs or x.dtype != weight.numbers:
            of = f"a matrix with {weight.inputs} inputs of {weight.numbers}"
            raise ValueError(f"an input [T, {inputs}] of {x.dtype} does not fit {of}")
        if bias is not None:
            if bias.shape != (weight.outputs,) or bias.dtype != weight.numbers:
                refuse("linear", x=x, bias=bias)
            bias = bias.contiguous()
        if step != 1:
            x, stride = x.contiguous(), inputs
        out = empty((rows, weight.columns), torch.float32 if wide else x.dtype)
        first = 0
        for number, part in enumerate(weight.apart or (weight,)):
            own_bias = None if bias is None else bias.data_ptr() + first * bias.itemsize
            given = part.address, x.data_ptr(), stride, own_bias, out.data_ptr() + first * out.itemsize
            sizes = weight.columns, rows, KINDS[out.dtype], GATES[kind]
            if added is None:
                plain(*given, *sizes)
            else:
                adapted(number, added, *given, *sizes)
            first += part.columns
        return out

    return linear
