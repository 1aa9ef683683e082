"""Shares of layers and heads for each rank: arithmetic without torch, so that a start can check it first."""

from __future__ import annotations

from dataclasses import dataclass

from models.config import ModelConfig

HEADS = "attention heads"


@dataclass(frozen=True)
class Span:
    """The piece [start, stop) of a dimension of `size` that one rank holds."""

    size: int
    start: int
    stop: int
    unit: int = 1
    """The features of a head, if the dimension is cut between heads only."""

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
        return Span(self.size * unit, self.start * unit, self.stop * unit, self.unit * unit)


def check_cut(model: ModelConfig, ranks: int, stages: int) -> None:
    """Refuse numbers of ranks and stages into which the model cannot be cut, before processes are started."""
    if ranks * stages > 1:
        model.require()
    layers_of(0, stages, model.num_layers)
    share_of(0, ranks, model.num_heads, HEADS)
    kv_heads_of(0, ranks, model.num_kv_heads)


def layers_of(stage: int, stages: int, count: int, together: int = 1) -> range:
    """A stage's run of the layers. First stages have one more if need be, since the last has the head.

    `together`: the last layers that must be in one stage; if they are more than its part, others have less.
    """
    if (most := count - together + 1) < stages:
        last = f" (the last {together} in one)" if together > 1 else ""
        raise ValueError(
            f"--pipeline-parallel-size {stages}: there are {count} layers, and each stage must have "
            f"one{last}; choose {most} or less"
        )
    if stages > 1 and together > count // stages:
        if stage == stages - 1:
            return range(count - together, count)
        return layers_of(stage, stages - 1, count - together)
    each, over = divmod(count, stages)
    start = stage * each + min(stage, over)
    return range(start, start + each + (stage < over))


def share_of(rank: int, ranks: int, size: int, what: str) -> Span:
    """The piece of `size` that `rank` holds; all pieces are equal. `what` names its units in the refusal."""
    if size % ranks:
        raise ValueError(
            f"--tensor-parallel-size {ranks}: {size} {what} cannot be divided evenly; "
            f"choose a size that divides {size}"
        )
    piece = size // ranks
    return Span(size, rank * piece, (rank + 1) * piece)


def kv_heads_of(rank: int, ranks: int, heads: int) -> Span:
    """The key/value heads of a rank. If there are fewer than ranks, neighbours hold the same head."""
    if heads >= ranks:
        return share_of(rank, ranks, heads, "key/value heads")
    if ranks % heads:
        raise ValueError(
            f"--tensor-parallel-size {ranks}: {heads} key/value heads cannot be copied evenly; "
            f"choose a size that divides {heads}, or a multiple of it"
        )
    start = rank * heads // ranks
    return Span(heads, start, start + 1)


def most_ranks_of(heads: int, kv_heads: int) -> int:
    """The most ranks, of 8, 4, 2 and 1, over which a model with these heads can be cut."""
    possible = (n for n in (8, 4, 2) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0))
    return next(possible, 1)


def sections_of(span: Span, most_ranks: int) -> int:
    """The number of sections of a rank's piece that sums over it add up apart (`models/ops/tree_sum.py`).

    The whole dimension has one for each of `most_ranks`, or fewer if it cannot be cut into so many: each has
    whole units, and an even number of features, which bfloat16 kernels read in pairs. So what one of 1, 2, 4
    or 8 ranks adds up is a branch of the same tree.
    """
    possible = (n for n in (8, 4, 2) if n <= most_ranks and _divides(n, span))
    held, rest = divmod(next(possible, 1) * span.length, span.size)
    return held if held and not rest else 1


def _divides(sections: int, span: Span) -> bool:
    return span.size // span.unit % sections == 0 and span.size // sections % 2 == 0
