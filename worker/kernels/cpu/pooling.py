"""The mean of a text's rows, and rows of length 1, by `csrc/pooling.c`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.ops import reference
from worker.kernels.cpu.library import INT, LONG, POINTER, Library
from worker.kernels.cpu.packing import KINDS
from worker.kernels.cpu.recording.outputs import empty


def bind(library: Library) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""
    add_up = library.function("mean", POINTER, LONG, LONG, LONG, POINTER, INT)
    scale = library.function("normalize", POINTER, LONG, LONG, LONG, POINTER, quick=True)

    def mean(rows: Tensor) -> Tensor:
        kind, (count, width) = KINDS.get(rows.dtype), rows.shape
        if kind is None or rows.stride(1) != 1:
            return reference.mean(rows)
        out = empty((1, width), torch.float32)
        add_up(rows.data_ptr(), rows.stride(0), count, width, out.data_ptr(), kind)
        return out

    def normalize(rows: Tensor) -> Tensor:
        if rows.dtype != torch.float32 or rows.stride(1) != 1:
            return reference.normalize(rows)
        out = empty(rows.shape, torch.float32)
        scale(rows.data_ptr(), rows.stride(0), *rows.shape, out.data_ptr())
        return out

    return {"mean": mean, "normalize": normalize}
