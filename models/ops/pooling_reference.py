"""The operations that merge rows of many sequences, in plain torch: each sequence is computed by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.ops.segments import Segments

Merge = Callable[[Tensor, int], Tensor]
"""The type of a function that merges rows [L, W], before which so many others are left out, to [1, W]."""


def pool(rows: Tensor, segments: Segments, mode: str, merge: Merge) -> Tensor:
    """Merge the rows of each sequence into one by `mode`: [N, W] -> [P, W] float32.

    `merge` does it for one, given those that are merged and how many come before them. It is given each
    apart, whose bits then depend on no other.
    """
    return torch.cat(
        [merge(rows[first:stop], first - start).float() for start, first, stop in segments.on_host]
    )


def apart(function: Callable[[Tensor], Tensor], rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Apply a function of rows [N, W], each for itself, to so many of them at a time -> [N, W'].

    Others change no bits of a row then, nor does its place in memory. A device that does not promise the same
    bits takes all rows at once.
    """
    return torch.cat([function(part.clone()) for part in rows.split(list(lengths))])
