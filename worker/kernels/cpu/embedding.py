"""Token embeddings and rotary angles, with which a model begins: `csrc/embedding.c`, `embed_packed.c`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.ops import reference
from models.weight_coding import LEVELS
from worker.kernels.cpu import quantized
from worker.kernels.cpu.library import FLOAT, LONG, POINTER, Library
from worker.kernels.cpu.packing import CODES, Packed
from worker.kernels.cpu.quantized import Quantized
from worker.kernels.cpu.recording.outputs import empty


def bind(library: Library) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""
    look_up = library.function("embed", POINTER, POINTER, POINTER, LONG, LONG, LONG, quick=True)
    widen = library.function("embed_packed", POINTER, POINTER, POINTER, POINTER, LONG, quick=True)
    levels = {kind: torch.tensor(numbers, dtype=torch.float32) for kind, numbers in LEVELS.items()}
    turn = library.function("angles", POINTER, POINTER, POINTER, LONG, LONG, FLOAT, quick=True)

    def embed(ids: Tensor, weight: Tensor) -> Tensor:
        if type(weight) is Packed:
            table = levels.get(CODES[weight.described.codes])
            out, ids = empty((len(ids), weight.inputs), weight.numbers), ids.contiguous()
            known = None if table is None else table.data_ptr()
            widen(ids.data_ptr(), weight.address, known, out.data_ptr(), len(ids))
            return out
        if type(weight) is Quantized or not (_are_numbers(ids) and weight.is_contiguous()):
            return quantized.embed(ids, weight)
        known, width = weight.shape
        out = empty((len(ids), width), weight.dtype)
        look_up(ids.data_ptr(), weight.data_ptr(), out.data_ptr(), len(ids), known, width * weight.itemsize)
        return out

    def angles(positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
        known = frequencies.dtype == torch.float32 and frequencies.dim() == 1
        if not (known and _are_numbers(positions) and frequencies.is_contiguous()):
            return reference.angles(positions, frequencies, scale)
        tokens, pairs = len(positions), len(frequencies)
        out = empty((tokens, 2 * pairs), torch.float32)
        turn(positions.data_ptr(), frequencies.data_ptr(), out.data_ptr(), tokens, pairs, scale)
        return out

    return {"embed": embed, "angles": angles}


def _are_numbers(x: Tensor) -> bool:
    """Whether the kernels can read these ids or positions [T]."""
    return x.dtype == torch.int64 and x.dim() == 1 and x.is_contiguous()
