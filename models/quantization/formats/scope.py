"""What a reader of a format needs of the place of a module in a checkpoint, and what readers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from models.ops.grouped_matrix import Grouped
from models.weight_pieces import DAMAGED, Cut, WeightsError

SCALES = ("float16", "bfloat16", "float32")
"""Number types of scales."""
WORD_BITS = 32
"""Bits of the words in which codes are packed."""


class Scope(Protocol):
    path: str

    @property
    def dtype(self) -> torch.dtype:
        """The number type of the model."""
        ...

    @property
    def headers_only(self) -> bool:
        """Whether tensors are only compared with what is expected, and come as zeros."""
        ...

    @property
    def is_real(self) -> bool:
        """Whether there are files, and not weights that are made up."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def stored_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor of this scope; None if there is none."""
        ...

    def stored(self, name: str, shape: Sequence[int], kinds: Sequence[str], cut: Cut | None = None) -> Tensor:
        """Read a tensor as it was stored, in one of these number types."""
        ...

    def ignore(self, *names: str) -> None:
        """Name tensors that are not needed."""
        ...

    def origin(self, name: str) -> str:
        """The file and the whole name of a tensor, for messages."""
        ...

    def expect(self, name: str) -> None:
        """Let it be an error if nobody takes this tensor, although it has been looked at."""
        ...


def covering(cut: Cut | None, unit: int, size: int, dim: int = 0) -> tuple[Cut | None, slice]:
    """Find the piece of a tensor that has a number, or word, for each `unit` elements of a dimension.

    `cut` is one of that dimension, or None for all of its `size` elements. Returns the cut of the tensor
    along its own `dim`, and where in what it covers the wanted elements lie.
    """
    if cut is None:
        return None, slice(0, size)
    first = cut.start // unit
    return Cut(dim, first, -(-cut.stop // unit)), slice(cut.start - first * unit, cut.stop - first * unit)


def groups_of(scope: Scope, stored: Tensor, matrix: Grouped) -> Tensor:
    """Check the stored group of each column, and return them as indices."""
    count = matrix.scales.shape[1]
    if not scope.is_real:
        drawn = torch.randperm(len(stored), generator=torch.Generator().manual_seed(0))
        return (drawn * count // len(stored)).to(stored.device)
    low, high = int(stored.min()), int(stored.max())
    if low < 0 or high >= count:
        raise refuse(scope, "g_idx", f"names groups from {low} to {high}, and there are {count}")
    return stored.long()


def read_one_scale(scope: Scope, names: Sequence[str]) -> float | None:
    """Read the first of these tensors that is a single scale; None if none is. Headers alone tell 1."""
    for name in names:
        shape = scope.stored_shape(name)
        if shape not in ((), (1,)):
            continue
        scale = scope.stored(name, shape, SCALES)
        if scope.headers_only:
            return 1.0
        if not scale.item() > 0:
            raise refuse(scope, name, f"is {scale.item():g}, but a scale must be above 0")
        return scale.float().item()
    return None


def refuse(scope: Scope, name: str, problem: str) -> WeightsError:
    """Make an error of a predicate on what the tensor `name` holds."""
    return WeightsError(f"{scope.origin(name)} {problem}; {DAMAGED}")
