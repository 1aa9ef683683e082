"""The position of this process among the ranks that share one model, and the pieces of tensors that it holds.

The layers are cut into runs, the stages; the ranks of a stage have a piece of each of its layers. The worker
decides which processes those are and how bytes travel between them, and passes in the `Collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from models.parallel.experts import ExpertPlace
from models.parallel.rank_shares import HEADS, Span, kv_heads_of, layers_of, sections_of, share_of

PADDING = 64
"""A rank's share of the vocabulary's rows is a multiple of this, for the kernels' sake."""


class Exchange(Protocol):
    """Tensors on their way between the ranks of a group."""

    def wait(self) -> object:
        """Return when all have come. Who waits for a later exchange of the group waits for this one too."""
        ...


class Collectives(Protocol):
    """Communication among some ranks: those of one stage, or those of one number in all replicas."""

    exact: bool
    """Whether `all_reduce` adds in float32 and in pairs, so that 1, 2, 4 and 8 ranks give the same bits."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks in the type of `x`, in which it may be made."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors side by side along the last dimension, in the order of the ranks."""
        ...

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> Exchange:
        """Begin to send each rank the tensor `out[rank]`, and to fill `into[rank]` with what it sends.

        Both are contiguous. Their own rank's is copied; a tensor without elements is not sent.
        """
        ...


@dataclass(frozen=True)
class Replicas:
    """The ranks of this one's number in all replicas that share experts: this is `rank` of `size`."""

    rank: int
    size: int
    group: Collectives


@dataclass(frozen=True)
class Parallel:
    """A rank's position: `rank` of `size` within its stage, which is `stage` of `stages`."""

    rank: int = 0
    size: int = 1
    group: Collectives | None = None
    stage: int = 0
    stages: int = 1
    most_ranks: int = 8
    """The most ranks, of 8, 4, 2 and 1, over which this model could be cut."""
    experts: ExpertPlace | None = None
    """The position among the ranks that share whole experts; None: each has a piece of every expert."""
    replicas: Replicas | None = None
    """The replicas with which this one shares experts; None: there are none."""
    guesses: bool = False
    """Whether the last stage embeds tokens, too, because a drafter does so by the model's matrix."""

    @property
    def first(self) -> bool:
        """Whether this stage begins with embeddings."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage has the last norm and the heads."""
        return self.stage == self.stages - 1

    @property
    def embeds(self) -> bool:
        """Whether this stage has the embeddings of tokens."""
        return self.first or (self.guesses and self.last)

    @property
    def undivided(self) -> Parallel:
        """The same stage as if it had one rank, for layers that each rank holds whole."""
        return Parallel(stage=self.stage, stages=self.stages)

    def share_layers(self, count: int, together: int = 1) -> range:
        return layers_of(self.stage, self.stages, count, together)

    def share(self, size: int, what: str) -> Span:
        return share_of(self.rank, self.size, size, what)

    def share_heads(self, heads: int) -> Span:
        return share_of(self.rank, self.size, heads, HEADS)

    def share_kv_heads(self, heads: int) -> Span:
        return kv_heads_of(self.rank, self.size, heads)

    def sections(self, inputs: Span) -> int:
        """The number of sections of a piece of inputs that are added up apart."""
        return sections_of(inputs, self.most_ranks)

    def share_padded(self, size: int) -> Span:
        """An equal piece for each rank, rounded up: the last ranks may hold less than others, or nothing."""
        piece = self.padded_length(size)
        return Span(size, min(size, self.rank * piece), min(size, (self.rank + 1) * piece))

    def padded_length(self, size: int) -> int:
        """The length of the piece that each rank allocates for `share_padded`: a multiple of PADDING."""
        return size if self.size == 1 else -(-size // (self.size * PADDING)) * PADDING

    @property
    def exact(self) -> bool:
        """Whether sums over ranks have the same bits for any number of them that divides 8."""
        return self.size == 1 or self._collectives().exact

    @property
    def adds_wide(self) -> bool:
        """Whether sums of experts leave this rank in float32, because those over ranks keep all digits."""
        groups = [self._collectives()] if self.size > 1 else []
        if self.replicas is not None:
            groups.append(self.replicas.group)
        return bool(groups) and all(group.exact for group in groups)

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
