"""This process's place among the ranks that share one model, and the piece of each dimension that it holds.

Which processes those are, and how bytes travel between them, is the worker's business: it hands in the
`Collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors side by side along the last dimension, in the order of the ranks."""
        ...


@dataclass(frozen=True)
class Span:
    """The piece [start, stop) of a dimension of `size` that one rank holds."""

    size: int
    start: int
    stop: int

    @classmethod
    def whole(cls, size: int) -> Span:
        return cls(size, 0, size)

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.length == self.size

    def times(self, unit: int) -> Span:
        """The same piece counted in smaller units: heads -> features."""
        return Span(self.size * unit, self.start * unit, self.stop * unit)


@dataclass(frozen=True)
class Parallel:
    rank: int = 0
    size: int = 1
    group: Collectives | None = None

    def share(self, size: int, what: str) -> Span:
        """An equal piece for each rank."""
        if size % self.size:
            raise ValueError(f"{size} {what} cannot be divided among {self.size} ranks evenly")
        piece = size // self.size
        return Span(size, self.rank * piece, (self.rank + 1) * piece)

    def share_heads(self, heads: int) -> Span:
        return self.share(heads, "attention heads")

    def share_kv_heads(self, heads: int) -> Span:
        """Of fewer heads than ranks, each is held by several neighbours, whose queries all need it."""
        if heads >= self.size:
            return self.share(heads, "key/value heads")
        if self.size % heads:
            raise ValueError(f"{heads} key/value heads cannot be copied to {self.size} ranks evenly")
        start = self.rank * heads // self.size
        return Span(heads, start, start + 1)

    def share_padded(self, size: int) -> Span:
        """As `share`, rounded up: the last ranks may hold less than the others, or nothing."""
        piece = -(-size // self.size)
        return Span(size, min(size, self.rank * piece), min(size, (self.rank + 1) * piece))

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else self._collectives().all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else self._collectives().all_gather(x)

    def _collectives(self) -> Collectives:
        if self.group is None:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} has no process group: "
                "a worker with more than one rank must hand one to Parallel"
            )
        return self.group
