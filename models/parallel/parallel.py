"""This process's place among the ranks that share one model, and the piece of each dimension that it holds.

The layers are cut into runs, the stages; the ranks of a stage have a piece of each of its layers.
Which processes those are, and how bytes travel between them, is the worker's business: it hands in the
`Collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from models.parallel.shares import Span, heads_of, kv_heads_of, layers_of, share_of

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
        return layers_of(self.stage, self.stages, count)

    def share(self, size: int, what: str) -> Span:
        return share_of(self.rank, self.size, size, what)

    def share_heads(self, heads: int) -> Span:
        return heads_of(self.rank, self.size, heads)

    def share_kv_heads(self, heads: int) -> Span:
        return kv_heads_of(self.rank, self.size, heads)

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
