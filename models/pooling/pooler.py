"""The pooler turns hidden states into vectors and labels: the task chooses tokens, head and activation.

On a CPU every sequence is pooled and passes its head by itself (`ops.pool`, `ops.apart`): sums run over its
own rows in their order, and no matrix product has the rows of another in it. So a text gives the same bits
alone and in any batch. Only work on each row alone (cuts, norms, activations) is done for many sequences at
once, and everything is on devices that promise no such bits. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.ops.pooling_ops import Segments
from models.pooling.config import Activation
from models.pooling.sentence_files import Mode

Function = Callable[[Tensor], Tensor]
"""A function of rows [K, D], each for itself."""


class PoolingLike(Protocol):
    """The request for one sequence, as the pooler reads it."""

    @property
    def task(self) -> str: ...
    @property
    def use_activation(self) -> bool | None:
        """Whether the result is normalised or activated; None leaves it to the model."""
        ...

    @property
    def dimensions(self) -> int | None: ...
    @property
    def skip(self) -> int:
        """The number of tokens at the beginning that are an instruction and stay out of a text's vector."""
        ...


@dataclass(slots=True)
class PoolBatch:
    """Finished sequences, packed, each with the rows that its head needs (`Pooler.needed_positions`)."""

    hidden: Tensor  # [N, H]: hidden states
    segments: Segments  # P sequences
    params: Sequence[PoolingLike]


class Rows(Protocol):
    """The choice of the tokens that answer, and of how they are merged."""

    needs_all: bool
    """Whether rows that are not the last one of a sequence may be needed."""
    name: str
    """What the spaces of vectors call it."""

    def needed_positions(self, tokens: Sequence[int]) -> Sequence[int]:
        """The positions of a sequence whose rows are needed, in order. Known before anything is computed."""
        ...


class Merged:
    """One row for the whole sequence; the results of several modes are laid side by side."""

    def __init__(self, modes: Sequence[Mode]) -> None:
        self.modes = tuple(modes)
        self.needs_all = self.modes != ("LAST",)
        self.name = "_".join(modes).lower()

    def needed_positions(self, tokens: Sequence[int]) -> Sequence[int]:
        return range(0 if self.needs_all else len(tokens) - 1, len(tokens))

    def __call__(self, rows: Tensor, segments: Segments) -> Tensor:
        """Merge the rows [N, H] of each of P sequences -> [P, H'] float32."""
        merged = [ops.pool(rows, segments, mode, _MERGE[mode]) for mode in self.modes]
        return merged[0] if len(merged) == 1 else torch.cat(merged, dim=-1)


class Every:
    """One row for each token."""

    needs_all = True
    name = "tokens"

    def needed_positions(self, tokens: Sequence[int]) -> Sequence[int]:
        return range(len(tokens))


class Tagged:
    """One row for each place where the tag stands, such as the end of a step of reasoning."""

    needs_all = True

    def __init__(self, tag: int) -> None:
        self.tag = tag
        self.name = f"tokens_{tag}"

    def needed_positions(self, tokens: Sequence[int]) -> Sequence[int]:
        return [position for position, token in enumerate(tokens) if token == self.tag]


def _weighted_mean(rows: Tensor, skip: int) -> Tensor:
    """A mean in which each token weighs as much as its position in the whole sequence, counted from 1."""
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
"""Each function merges rows [L, H], before which `skip` others are left out, to [1, H]."""


def _sigmoid(rows: Tensor) -> Tensor:
    """The sigmoid whose last digits, unlike those of torch.sigmoid, do not depend on a number's place."""
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
    """The parts that answer one task: hidden states pass `before`, `rows`, `project` and `activation`."""

    rows: Rows
    project: Function | None
    """The projection or classifier that follows merging, if there is one."""
    width: int
    """The width of a row that leaves `project`."""
    activation: Function
    activates: bool
    """Whether the activation is used if the request does not say."""
    dimensions: int | None = None
    """The width to which rows are cut if the request does not say."""
    before: Function | None = None
    """A function of every token's row ahead of merging, if there is one."""

    @property
    def is_merged(self) -> bool:
        return isinstance(self.rows, Merged)

    def cut(self, dimensions: int | None) -> int:
        return min(dimensions or self.dimensions or self.width, self.width)

    def pool(self, rows: Tensor, segments: Segments, members: Sequence[int]) -> Tensor:
        """Merge and project hidden states [N, H] of sequences, those of `members` -> [R, width] float32.

        R is the number of members if each is merged into one row, else that of their rows.
        """
        lengths, chosen = segments.lengths, segments.of(members)
        if not isinstance(self.rows, Merged) and chosen is not segments:
            parts = rows.split(lengths)
            rows, lengths = torch.cat([parts[i] for i in members]), chosen.lengths
        before, project = self.before, self.project
        if before is not None:
            rows = ops.apart(lambda part: before(part.float()), rows, lengths)
        if isinstance(self.rows, Merged):
            rows, lengths = self.rows(rows, chosen), [1] * len(members)
        return (
            rows.float() if project is None else ops.apart(lambda part: project(part.float()), rows, lengths)
        )

    def finish(self, rows: Tensor, use_activation: bool | None, dimensions: int | None) -> Tensor:
        """Cut and activate rows [R, width] -> [R, the cut width]."""
        rows = rows[:, : self.cut(dimensions)]
        activates = self.activates if use_activation is None else use_activation
        return self.activation(rows) if activates else rows


class Pooler(nn.Module):
    """A pooler answers each sequence of a batch by the head of its task.

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

    def needed_positions(self, params: PoolingLike, tokens: Sequence[int]) -> Sequence[int]:
        """The positions of a sequence of these tokens whose hidden states `forward` must get, in order."""
        return self._head(params.task).rows.needed_positions(tokens)

    def width(self, params: PoolingLike) -> int:
        """The width of each vector with which `forward` answers."""
        return self._head(params.task).cut(params.dimensions)

    def forward(self, batch: PoolBatch) -> list[Tensor]:
        """Answer in the order of the batch, in float32: [D] for a merged sequence, else [K, D]."""
        lengths = batch.segments.lengths
        answers: dict[int, Tensor] = {}
        for (task, use_activation, dimensions), members in _alike(batch.params).items():
            head = self._head(task)
            pooled = head.pool(batch.hidden, batch.segments, members)
            finished = head.finish(pooled, use_activation, dimensions)
            pieces = finished if head.is_merged else finished.split([lengths[i] for i in members])
            answers |= zip(members, pieces, strict=True)
        return [answers[i] for i in range(len(lengths))]

    def _head(self, task: str) -> TaskHead:
        if task not in self.heads:
            raise ValueError(f"this model has no task {task!r}; it has {', '.join(sorted(self.tasks))}")
        return self.heads[task]


def _alike(params: Sequence[PoolingLike]) -> dict[tuple[str, bool | None, int | None], list[int]]:
    """The indices of the sequences that are finished in the same way, by (task, activation, dimensions)."""
    groups: dict[tuple[str, bool | None, int | None], list[int]] = {}
    for index, asked in enumerate(params):
        groups.setdefault((asked.task, asked.use_activation, asked.dimensions), []).append(index)
    return groups
