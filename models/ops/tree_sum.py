"""The order in which sums over ranks are added up: a binary tree, of which each rank computes a branch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def add_in_pairs(pieces: Sequence[Tensor]) -> Tensor:
    """Add neighbours, then their sums: ((p0 + p1) + (p2 + p3)) + ... One that has no neighbour waits."""
    pieces = list(pieces)
    while len(pieces) > 1:
        pairs = [left + right for left, right in zip(pieces[::2], pieces[1::2], strict=False)]
        pieces = pairs + pieces[2 * len(pairs) :]
    return pieces[0]
