"""Pieces of stored tensors, and what is made of them: the parts that readers of all formats share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.checkpoint.weights import Weights
from models.ops.grouped_matrix import Grouped
from models.weight_coding import Coding
from models.weight_slices import DAMAGED, Cut, WeightsError

SCALES = ("float16", "bfloat16", "float32")
"""Number types of scales."""
WORD_BITS = 32
"""Bits of the words in which codes are packed."""


def covering(cut: Cut | None, unit: int, size: int, dim: int = 0) -> tuple[Cut | None, slice]:
    """Find the piece of a tensor that has a number, or word, for each `unit` elements of a dimension.

    `cut` is one of that dimension, or None for all of its `size` elements. Returns the cut of the tensor
    along its own `dim`, and where in what it covers the wanted elements lie.
    """
    if cut is None:
        return None, slice(0, size)
    first = cut.start // unit
    return Cut(dim, first, -(-cut.stop // unit)), slice(cut.start - first * unit, cut.stop - first * unit)


def unread_codes(stored: Tensor, columns: int) -> Tensor:
    """The codes [N, columns] of stored ones that have no memory: operations on those would take longer."""
    return stored.new_empty(len(stored), columns, dtype=torch.uint8)


def grouped(
    scope: Weights, coding: Coding, codes: Tensor, scales: Tensor, offsets: Tensor | None = None
) -> Grouped:
    """Make the form of codes [N, K], of scales and of the codes that stand for 0."""
    return Grouped(
        codes=codes,
        bits=coding.bits,
        group=coding.group,
        scales=scales,
        offsets=offsets,
        inputs=codes.shape[1],
        dtype=scope.dtype,
        input_bits=coding.input_bits,
        kind=coding.codes,
    )


def groups_of(scope: Weights, stored: Tensor, matrix: Grouped) -> Tensor:
    """Check the stored group of each column, and return them as indices."""
    count = matrix.scales.shape[1]
    if not scope.is_real:
        drawn = torch.randperm(len(stored), generator=torch.Generator().manual_seed(0))
        return (drawn * count // len(stored)).to(stored.device)
    low, high = int(stored.min()), int(stored.max())
    if low < 0 or high >= count:
        raise refuse(scope, "g_idx", f"names groups from {low} to {high}, and there are {count}")
    return stored.long()


def read_one_scale(scope: Weights, names: Sequence[str]) -> float | None:
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


def refuse(scope: Weights, name: str, problem: str) -> WeightsError:
    """Make an error of a predicate on what the tensor `name` holds."""
    return WeightsError(f"{scope.origin(name)} {problem}; {DAMAGED}")
