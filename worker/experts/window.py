"""The tokens of experts in the last steps, from running totals."""

from __future__ import annotations

from collections import deque

from torch import Tensor

BUCKETS = 8
"""The parts of a window: totals are remembered so often in it, and it may be longer by one of them."""


class LoadWindow:
    """Subtracts totals of some time ago from those of now, which layers add to in place."""

    def __init__(self, totals: Tensor, size: int) -> None:
        """`totals` [L, E]; `size`: the number of steps of the window."""
        self._totals = totals
        self._bucket = -(-size // BUCKETS)
        self._steps = 0
        self._before = deque([totals.clone()], maxlen=-(-size // self._bucket) + 1)

    def advance(self) -> None:
        """Notice that a step begins."""
        if self._steps and self._steps % self._bucket == 0:
            self._before.append(self._totals.clone())
        self._steps += 1

    def loads(self) -> Tensor:
        """The tokens of each expert in the window [L, E], the step that begins now not among them."""
        return self._totals - self._before[0]
