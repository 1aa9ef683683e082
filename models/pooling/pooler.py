"""From hidden states to vectors and labels: which tokens, which head, which activation, chosen by task.

Every sequence is pooled and passes its head by itself: sums run over its own rows in their order, and no
matrix product has the rows of another in it. So a text gives the same bits alone and in any batch; only what
works on each row alone (cuts, norms, activations) is done for many at once. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.pooling.config import Activation
from models.pooling.sentence_files import Mode

Function = Callable[[Tensor], Tensor]
"""Of rows [K, D], each for itself."""


class PoolingLike(Protocol):
    """What is asked for one sequence."""

    @property
    def task(self) -> str: ...
    @property
    def use_activation(self) -> bool | None:
        """None: as the model does it."""
        ...

    @property
    def dimensions(self) -> int | None: ...
    @property
    def skip(self) -> int:
        """So many tokens at the beginning are an instruction, and stay out of a text's vector."""
        ...


@dataclass(slots=True)
class PoolBatch:
    """Finished sequences, packed. Of one that needs its last row only, no other row is here."""

    hidden: Tensor  # [N, H]: the trunk's output
    ids: Tensor  # [N]: the tokens
    lengths: list[int]  # of the sequences; their sum is N
    params: Sequence[PoolingLike]


class Rows(Protocol):
    """Which tokens answer, and how they are merged."""

    needs_all: bool
    """False: the last row of a sequence suffices."""

    def __call__(self, rows: Tensor, ids: Tensor, skip: int) -> Tensor:
        """A sequence's rows [L, H] and tokens [L] -> [K, H'] float32."""
        ...


class Merged:
    """One row for the whole sequence; of several modes, side by side."""

    def __init__(self, modes: Sequence[Mode]) -> None:
        self.modes = tuple(modes)
        self.needs_all = self.modes != ("LAST",)

    def __call__(self, rows: Tensor, ids: Tensor, skip: int) -> Tensor:
        # A sequence that is nothing but its instruction is merged whole: there is no vector of no tokens.
        skip = skip if skip < len(rows) else 0
        if skip:
            rows = rows[skip:]
        merged = [_MERGE[mode](rows, skip) for mode in self.modes]
        return merged[0] if len(merged) == 1 else torch.cat(merged, dim=-1)


class Every:
    needs_all = True

    def __call__(self, rows: Tensor, ids: Tensor, skip: int) -> Tensor:
        return rows.float()


class Tagged:
    """The rows where the tag stands: the ends of the steps of a reasoning."""

    needs_all = True

    def __init__(self, tag: int) -> None:
        self.tag = tag

    def __call__(self, rows: Tensor, ids: Tensor, skip: int) -> Tensor:
        return rows[ids == self.tag].float()


def _weighted_mean(rows: Tensor, skip: int) -> Tensor:
    """Later tokens weigh more: each as much as its place in the whole sequence, from 1."""
    weights = torch.arange(skip + 1, skip + len(rows) + 1, device=rows.device, dtype=torch.float32)  # [L]
    return (rows.float() * weights.unsqueeze(-1)).sum(0, keepdim=True) / weights.sum()


_MERGE: dict[Mode, Callable[[Tensor, int], Tensor]] = {
    "CLS": lambda rows, skip: rows[:1].float(),
    "LAST": lambda rows, skip: rows[-1:].float(),
    "MEAN": lambda rows, skip: ops.mean(rows),
    "MAX": lambda rows, skip: rows.amax(0, keepdim=True).float(),
    "MEAN_SQRT_LEN": lambda rows, skip: rows.float().sum(0, keepdim=True) / len(rows) ** 0.5,
    "WEIGHTED_MEAN": _weighted_mean,
}
"""Of the rows that `skip` others stand before, in any type -> float32."""


def _sigmoid(rows: Tensor) -> Tensor:
    """In steps whose last digits do not depend on where a number stands, unlike those of torch.sigmoid."""
    return 1 / (1 + torch.exp(-rows))


ACTIVATIONS: dict[Activation, Function] = {
    "identity": lambda rows: rows,
    "sigmoid": _sigmoid,
    "softmax": lambda rows: rows.softmax(dim=-1),
}


def normalize(rows: Tensor) -> Tensor:
    return ops.normalize(rows)


@dataclass(frozen=True, kw_only=True)
class TaskHead:
    """The way of one task."""

    rows: Rows
    project: Function
    width: int
    """Of a row that leaves the head."""
    activation: Function
    activates: bool
    """Whether the activation is used if nobody says."""
    dimensions: int | None = None
    """Where rows are cut if nobody says."""
    before: Function | None = None
    """For every token, ahead of merging."""

    @property
    def is_merged(self) -> bool:
        return isinstance(self.rows, Merged)

    def cut(self, dimensions: int | None) -> int:
        return min(dimensions or self.dimensions or self.width, self.width)

    def pool(self, rows: Tensor, ids: Tensor, skip: int) -> Tensor:
        """A sequence's hidden states [L, H] -> [K, width] float32."""
        if self.before is not None:
            rows = self.before(rows.float())
        return self.project(self.rows(rows, ids, skip))

    def finish(self, rows: Tensor, use_activation: bool | None, dimensions: int | None) -> Tensor:
        """[R, width] -> [R, the cut width]."""
        rows = rows[:, : self.cut(dimensions)]
        return self.activation(rows) if self._activates(use_activation) else rows

    def _activates(self, use_activation: bool | None) -> bool:
        return self.activates if use_activation is None else use_activation


class Pooler(nn.Module):
    """Answers each sequence of a batch by the head of its task.

    `projections` are the heads whose weights lie beside the checkpoint. Other heads belong to the model,
    which fills them.
    """

    def __init__(self, heads: Mapping[str, TaskHead], projections: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.heads = dict(heads)
        self.tasks = frozenset(heads)
        self.projections = nn.ModuleList(projections)

    def pull(self, weights: Weights) -> None:
        for projection in self.projections:
            load(projection, weights)

    def needs_all_rows(self, params: PoolingLike) -> bool:
        return self._head(params.task).rows.needs_all

    def width(self, params: PoolingLike) -> int:
        """Of each vector that `forward` answers with."""
        return self._head(params.task).cut(params.dimensions)

    def forward(self, batch: PoolBatch) -> list[Tensor]:
        """float32, in the order of the batch: [D] for a merged sequence, else [K, D]."""
        hidden, ids = batch.hidden.split(batch.lengths), batch.ids.split(batch.lengths)
        answers: dict[int, Tensor] = {}
        for (task, use_activation, dimensions), members in _alike(batch.params).items():
            head = self._head(task)
            pooled = [head.pool(hidden[i], ids[i], batch.params[i].skip) for i in members]
            finished = head.finish(torch.cat(pooled), use_activation, dimensions)
            pieces = finished if head.is_merged else finished.split([len(rows) for rows in pooled])
            answers |= zip(members, pieces, strict=True)
        return [answers[i] for i in range(len(batch.lengths))]

    def _head(self, task: str) -> TaskHead:
        if task not in self.heads:
            raise ValueError(f"this model has no task {task!r}; it has {', '.join(sorted(self.tasks))}")
        return self.heads[task]


def _alike(params: Sequence[PoolingLike]) -> dict[tuple[str, bool | None, int | None], list[int]]:
    """The places in the batch of those that are finished in the same way."""
    groups: dict[tuple[str, bool | None, int | None], list[int]] = {}
    for index, asked in enumerate(params):
        groups.setdefault((asked.task, asked.use_activation, asked.dimensions), []).append(index)
    return groups
