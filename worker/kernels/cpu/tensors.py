"""Prepares tensors for C kernels: checks types and shapes, and makes memory for results.

Sizes come from checkpoints, and from models that others wrote. A kernel takes most of them for granted, so
each operation compares its tensors first, or it would read past the end of one. That takes less than a
microsecond.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

FLOAT32, BFLOAT16, INT8 = 0, 1, 2
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
"""The number types that kernels compute with: `kind` in `csrc/vec.h`."""

Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""The type of a function that gives memory for a tensor of some shape and type."""

_allocate: Allocate | None = None


def refuse(operation: str, **given: Tensor | None) -> NoReturn:
    """Raise ValueError with the shapes of the tensors that an operation was given."""
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items() if x is not None)
    raise ValueError(f"{operation}: these tensors do not fit each other: {shapes}")


def check_sections(operation: str, sections: int) -> None:
    """Refuse numbers of sections that kernels have no room for: `MOST_SECTIONS` in `csrc/sections.h`."""
    if sections not in (1, 2, 4, 8):
        raise ValueError(f"{operation}: sums are made in 1, 2, 4 or 8 sections, not in {sections}")


def address(x: Tensor | None) -> int | None:
    """The address of a tensor's memory; None is the null pointer."""
    return None if x is None else x.data_ptr()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for the result of an operation, with anything in it. `allocated_by` decides where it lies."""
    return torch.empty(shape, dtype=dtype) if _allocate is None else _allocate(shape, dtype)


@contextmanager
def allocated_by(allocate: Allocate) -> Iterator[None]:
    """Let `empty` hand out what this function gives."""
    global _allocate
    _allocate = allocate
    try:
        yield
    finally:
        _allocate = None


class Memory:
    """Hands out pieces of a buffer, and hands them out again when no tensor that was made of them is left.

    The same operations in the same order get the same pieces. So all layers share what one of them needs: a
    few megabytes, of which much stays in the cache.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._bytes = buffer.numpy()
        self._used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """The starts of pieces that came back, by their size."""

    def take(self, nbytes: int) -> Tensor | None:
        """The piece [nbytes] uint8, or None if no memory is left."""
        size = -(-nbytes // 64) * 64
        free = self._free[size]
        if not free and self._used + size > len(self._bytes):
            return None
        start = free.pop() if free else self._used
        self._used = max(self._used, start + size)
        piece = self._bytes[start : start + nbytes]
        weakref.finalize(piece, free.append, start)  # the tensor made of it holds it, as all its views do
        return torch.frombuffer(piece, dtype=torch.uint8)
