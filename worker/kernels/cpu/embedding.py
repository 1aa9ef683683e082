"""What a model begins with, by `csrc/embedding.c`: rows of its embedding, and the angles of its positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from models.ops import reference
from worker.kernels.cpu.library import FLOAT, LONG, POINTER, Library


def bind(library: Library) -> dict[str, Callable[..., Any]]:
    """For `models.ops.use`."""
    look_up = library.function("embed", POINTER, POINTER, POINTER, LONG, LONG, LONG, quick=True)
    turn = library.function("angles", POINTER, POINTER, POINTER, LONG, LONG, FLOAT, quick=True)

    def embed(ids: Tensor, weight: Tensor) -> Tensor:
        if not (ids.is_contiguous() and weight.is_contiguous()):
            return reference.embed(ids, weight)
        known, width = weight.shape
        out = weight.new_empty(len(ids), width)
        look_up(ids.data_ptr(), weight.data_ptr(), out.data_ptr(), len(ids), known, width * weight.itemsize)
        return out

    def angles(positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
        if not (positions.is_contiguous() and frequencies.is_contiguous()):
            return reference.angles(positions, frequencies, scale)
        tokens, pairs = len(positions), len(frequencies)
        out = frequencies.new_empty(tokens, 2 * pairs)
        turn(positions.data_ptr(), frequencies.data_ptr(), out.data_ptr(), tokens, pairs, scale)
        return out

    return {"embed": embed, "angles": angles}
