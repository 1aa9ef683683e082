"""Pooling by Triton: `pool` merges the rows of all sequences of a step in one launch; `apart` has none.

Heads compute all rows at once: bits that do not depend on the batch are promised for the CPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.ops import pooling_ops
from models.ops.pooling_ops import Merge, Segments
from worker.kernels.cuda.launch import launch

MODES = ("CLS", "LAST", "MEAN", "MAX", "MEAN_SQRT_LEN", "WEIGHTED_MEAN")
"""The ways of merging, in the order of the kernel's numbers for them."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS, _COLUMNS = 64, 64


@triton.jit(do_not_specialize=["mode"])
def merge_rows(rows_ptr, places_ptr, out_ptr, stride, width, mode, ROWS: constexpr, COLUMNS: constexpr):
    """Merge some columns of the rows of one sequence: the first, the last, or a sum or the largest of all."""
    sequence = tl.program_id(0)
    start = tl.load(places_ptr + 3 * sequence)
    first = tl.load(places_ptr + 3 * sequence + 1)
    stop = tl.load(places_ptr + 3 * sequence + 2)
    count = stop - first
    if mode == 0:
        stop = first + 1
    if mode == 1:
        first = stop - 1
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    for begin in range(first, stop, ROWS):
        row = begin + tl.arange(0, ROWS)
        there = (row < stop)[:, None] & (column < width)[None, :]
        at = rows_ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
        x = tl.load(at, mask=there, other=0.0).to(tl.float32)
        weight = tl.where(row < stop, 1.0, 0.0)
        if mode == 5:
            weight *= (row - start + 1).to(tl.float32)
        total += tl.sum(x * weight[:, None], 0)
        weights += weight
        largest = tl.maximum(largest, tl.max(tl.where(there, x, float("-inf")), 0))
    if mode == 2 or mode == 5:
        total /= tl.sum(weights, 0)
    if mode == 3:
        total = tl.where(total == total, largest, total)  # a NaN stays one: whoever reads it must know
    if mode == 4:
        total /= tl.sqrt(count.to(tl.float32))
    tl.store(out_ptr + sequence.to(tl.int64) * width + column, total, mask=column < width)


def pool(rows: Tensor, segments: Segments, mode: str, merge: Merge) -> Tensor:
    if rows.dtype not in _DTYPES or rows.stride(1) != 1:
        return pooling_ops.pool(rows, segments, mode, merge)
    count, width = len(segments.places), rows.shape[1]
    out = torch.empty(count, width, dtype=torch.float32, device=rows.device)
    launch(
        merge_rows,
        (count, -(-width // _COLUMNS)),
        *(rows, segments.places, out, rows.stride(0), width, MODES.index(mode), _ROWS, _COLUMNS),
        num_warps=4,
    )
    return out


def apart(function: Callable[[Tensor], Tensor], rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Apply the function to all rows at once."""
    return function(rows)


OPERATIONS: dict[str, Callable[..., Any]] = {"pool": pool, "apart": apart}
"""The operations of this module by name, for `models.ops.use`."""
