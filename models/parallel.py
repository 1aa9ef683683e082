"""This process's place among the ranks that share one model, and the piece of each dimension that it holds.

The layers are cut into runs, the stages; the ranks of a stage have a piece of each of its layers.
Which processes those are, and how bytes travel between them, is the worker's business: it hands in the
`Collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

PADDING = 64
"""Rows of a vocabulary that are held together."""


class Collectives(Protocol):
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, which may be made in `x` itself."""
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
    """Among those that share each layer of this stage."""
    size: int = 1
    group: Collectives | None = None
    stage: int = 0
    stages: int = 1

    @property
    def first(self) -> bool:
        """This stage has the embeddings."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """This stage has the last norm and the heads."""
        return self.stage == self.stages - 1

    @property
    def undivided(self) -> Parallel:
        """For what each rank of a stage holds whole."""
        return Parallel(stage=self.stage, stages=self.stages)

    def share_layers(self, count: int) -> range:
        """This stage's run of the layers. What is over goes to the first ones: the last has the head."""
        if count < self.stages:
            raise ValueError(
                f"--pipeline-parallel-size {self.stages}: there are {count} layers, and each stage must have "
                f"one; choose {count} or less"
            )
        each, over = divmod(count, self.stages)
        start = self.stage * each + min(self.stage, over)
        return range(start, start + each + (self.stage < over))

    def share(self, size: int, what: str) -> Span:
        """An equal piece for each rank."""
        if size % self.size:
            raise ValueError(
                f"--tensor-parallel-size {self.size}: {size} {what} cannot be divided evenly; "
                f"choose a size that divides {size}"
            )
        piece = size // self.size
        return Span(size, self.rank * piece, (self.rank + 1) * piece)

    def share_heads(self, heads: int) -> Span:
        return self.share(heads, "attention heads")

    def share_kv_heads(self, heads: int) -> Span:
        """Of fewer heads than ranks, each is held by several neighbours, whose queries all need it."""
        if heads >= self.size:
            return self.share(heads, "key/value heads")
        if self.size % heads:
            raise ValueError(
                f"--tensor-parallel-size {self.size}: {heads} key/value heads cannot be copied evenly; "
                f"choose a size that divides {heads}, or a multiple of it"
            )
        start = self.rank * heads // self.size
        return Span(heads, start, start + 1)

    def share_padded(self, size: int) -> Span:
        """As `share`, rounded up: the last ranks may hold less than the others, or nothing."""
        piece = self.padded_length(size)
        return Span(size, min(size, self.rank * piece), min(size, (self.rank + 1) * piece))

    def padded_length(self, size: int) -> int:
        """Of the piece that each rank has room for, in `share_padded`: a multiple of what kernels work on."""
        return size if self.size == 1 else -(-size // (self.size * PADDING)) * PADDING

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
