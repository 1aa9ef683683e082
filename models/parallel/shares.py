"""How layers and heads are shared among ranks: arithmetic, without torch, so that a start can do it first."""

from __future__ import annotations

from dataclasses import dataclass

from models.config import ModelConfig


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


def check_cut(model: ModelConfig, ranks: int, stages: int) -> None:
    """What cannot be cut so is told before a process is started for each piece."""
    if ranks * stages > 1:
        model.require()
    layers_of(0, stages, model.num_layers)
    heads_of(0, ranks, model.num_heads)
    kv_heads_of(0, ranks, model.num_kv_heads)


def layers_of(stage: int, stages: int, count: int) -> range:
    """A stage's run of the layers. What is over goes to the first ones: the last has the head."""
    if count < stages:
        raise ValueError(
            f"--pipeline-parallel-size {stages}: there are {count} layers, and each stage must have one; "
            f"choose {count} or less"
        )
    each, over = divmod(count, stages)
    start = stage * each + min(stage, over)
    return range(start, start + each + (stage < over))


def share_of(rank: int, ranks: int, size: int, what: str) -> Span:
    """An equal piece for each rank."""
    if size % ranks:
        raise ValueError(
            f"--tensor-parallel-size {ranks}: {size} {what} cannot be divided evenly; "
            f"choose a size that divides {size}"
        )
    piece = size // ranks
    return Span(size, rank * piece, (rank + 1) * piece)


def heads_of(rank: int, ranks: int, heads: int) -> Span:
    return share_of(rank, ranks, heads, "attention heads")


def kv_heads_of(rank: int, ranks: int, heads: int) -> Span:
    """Of fewer heads than ranks, each is held by several neighbours, whose queries all need it."""
    if heads >= ranks:
        return share_of(rank, ranks, heads, "key/value heads")
    if ranks % heads:
        raise ValueError(
            f"--tensor-parallel-size {ranks}: {heads} key/value heads cannot be copied evenly; "
            f"choose a size that divides {heads}, or a multiple of it"
        )
    start = rank * heads // ranks
    return Span(heads, start, start + 1)
