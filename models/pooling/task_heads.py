"""The pooler turns hidden states into vectors and labels: the task chooses tokens, head and activation.

On a CPU every sequence is pooled and passes its head by itself (`ops.pool`, `ops.apart`): sums run over its
own rows in their order, and no matrix product has the rows of another in it. So a text gives the same bits
alone and in any batch. Only work on each row alone (cuts, norms, activations) is done for many sequences at
once, and everything is on devices that promise no such bits. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.ops.pooling_ops import Segments
from models.pooling.config import Activation
from models.pooling.pooling_modes import MERGERS
from models.pooling.representations import Splade, TokenVectors
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

    @property
    def outputs(self) -> Sequence[str]:
        """Other tasks that are answered from the same hidden states."""
        ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """The task ner: the pieces of the text, from one position to another, that are labels or words."""
        ...

    @property
    def labels(self) -> int:
        """The first spans, so many, are those of labels; entities are looked for in the others."""
        ...

    @property
    def query(self) -> bool:
        """Whether the text is a query, and not a document."""
        ...


@dataclass(slots=True)
class PoolBatch:
    """Finished sequences, packed, each with the rows that its head needs (`Pooler.needed_positions`)."""

    hidden: Tensor  # [N, H]: hidden states
    segments: Segments  # P sequences
    params: Sequence[PoolingLike]
    pieces: Pieces | None = None  # of the task ner alone
    counted: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    """The rows whose vectors count, counted from the first of a sequence, for those where not all do."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The rows of which those of labels and words are made, several of each sequence."""

    segments: Segments
    counts: Sequence[int]
    """The number of pieces of each sequence."""


class Rows(Protocol):
    """The choice of the tokens that answer, and of how they are merged."""

    needs_all: bool
    """Whether rows that are not the last one of a sequence may be needed."""

    def needed_positions(self, tokens: Sequence[int], *, query: bool) -> Sequence[int]:
        """The positions of a sequence whose rows are needed, in order. Known before anything is computed."""
        ...


class Merged:
    """One row for the whole sequence; the results of several modes are laid side by side."""

    def __init__(self, modes: Sequence[Mode]) -> None:
        self.modes = tuple(modes)
        self.needs_all = self.modes != ("LAST",)

    def needed_positions(self, tokens: Sequence[int], *, query: bool = False) -> Sequence[int]:
        return range(0 if self.needs_all else len(tokens) - 1, len(tokens))

    def __call__(self, rows: Tensor, segments: Segments) -> Tensor:
        """Merge the rows [N, H] of each of P sequences -> [P, H'] float32."""
        merged = [ops.pool(rows, segments, mode, MERGERS[mode]) for mode in self.modes]
        return merged[0] if len(merged) == 1 else torch.cat(merged, dim=-1)


_LOGITS_AT_ONCE = 64
"""Tokens whose logits are in memory at a time: a vocabulary has as many as 250,000."""


class VocabularyLike(Protocol):
    """A head that gives rows [K, H] their logits [K, V], to which `bias` [V] is to be added."""

    bias: nn.Parameter

    def __call__(self, rows: Tensor, /) -> Tensor: ...


class Weighed:
    """One row for the whole sequence, of the width of the vocabulary: what SPLADE makes of tokens' logits."""

    needs_all = True

    def __init__(self, head: VocabularyLike, form: Splade) -> None:
        self._head = head
        self._takes_largest = form.pooling_strategy == "max"
        self._logarithms = 2 if form.activation_function == "log1p_relu" else 1

    def needed_positions(self, tokens: Sequence[int], *, query: bool = False) -> Sequence[int]:
        return range(len(tokens))

    def __call__(self, rows: Tensor, segments: Segments) -> Tensor:
        """Weigh the tokens [N, H] of each of P sequences -> [P, V] float32."""
        return torch.stack([self._weigh(rows[first:stop]) for _, first, stop in segments.on_host])

    def _weigh(self, rows: Tensor) -> Tensor:
        pieces, bias = (self._head(part.clone()) for part in rows.split(_LOGITS_AT_ONCE)), self._head.bias
        if self._takes_largest:  # sums and logarithms rise with what they are made of, so they can follow
            return self._activate(torch.stack([piece.amax(0) for piece in pieces]).amax(0) + bias)
        return torch.stack([self._activate(piece + bias).sum(0) for piece in pieces]).sum(0)

    def _activate(self, logits: Tensor) -> Tensor:
        weights = logits.relu()
        for _ in range(self._logarithms):
            weights = weights.log1p()
        return weights


class Counted:
    """One row for each token whose vector counts when texts are compared."""

    needs_all = True

    def __init__(self, which: TokenVectors) -> None:
        self._which = which

    def needed_positions(self, tokens: Sequence[int], *, query: bool = False) -> Sequence[int]:
        return self._which.counts(tokens, query=query)


class Every:
    """One row for each token."""

    needs_all = True

    def needed_positions(self, tokens: Sequence[int], *, query: bool = False) -> Sequence[int]:
        return range(len(tokens))


class Tagged:
    """One row for each place where the tag stands, such as the end of a step of reasoning."""

    needs_all = True

    def __init__(self, tag: int) -> None:
        self.tag = tag

    def needed_positions(self, tokens: Sequence[int], *, query: bool = False) -> Sequence[int]:
        return [position for position, token in enumerate(tokens) if token == self.tag]


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


@dataclass(frozen=True)
class SparseWeights:
    """A choice among the weights that a head computes."""

    without: tuple[int, ...] = ()
    """Tokens that get none."""
    most: int | None = None
    """The greatest number of weights of a text: the largest are kept."""


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

    sparse: SparseWeights | None = None
    """Set if most numbers are zero: they are the weights of tokens of the text, or of the vocabulary."""
    reduce: Callable[[Tensor, bool], Tensor] | None = None
    """What makes fewer of a text's finished rows [K, D], given whether it is a query."""

    @property
    def is_merged(self) -> bool:
        return isinstance(self.rows, Merged | Weighed)

    def cut(self, dimensions: int | None) -> int:
        if self.sparse:
            return self.width
        return min(dimensions or self.dimensions or self.width, self.width)

    def pool(self, batch: PoolBatch, members: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Merge and project hidden states of the sequences `members` -> rows [R, width] float32, and how many
        of them are each one's."""
        segments = batch.segments.of(members)
        if self.is_merged:
            counts = [1] * len(members)
            return self._project(self.merge(batch, segments), counts), counts
        rows, counts = self._choose(batch, members, segments)
        return self._project(self._prepare(rows, counts), counts), counts

    def merge(self, batch: PoolBatch, segments: Segments | None = None) -> Tensor:
        """Merge the hidden states of sequences -> rows [P, W]."""
        rows, merge = batch.hidden, self.rows
        if not isinstance(merge, Merged | Weighed):
            raise ValueError("a head for tokens merges nothing")
        if self.before is not None:
            rows = self._prepare(rows, batch.segments.lengths)
        return merge(rows, segments or batch.segments)

    def answer(self, merged: Tensor, use_activation: bool | None, dimensions: int | None) -> Tensor:
        """Project and finish merged rows [P, W] -> [P, the cut width]."""
        return self.finish(self._project(merged, [1] * merged.shape[0]), use_activation, dimensions)

    def _prepare(self, rows: Tensor, lengths: Sequence[int]) -> Tensor:
        before = self.before
        return rows if before is None else ops.apart(lambda part: before(part.float()), rows, lengths)

    def _project(self, rows: Tensor, lengths: Sequence[int]) -> Tensor:
        project = self.project
        if project is not None:
            rows = ops.apart(lambda part: project(part.float()), rows, lengths)
        return rows.float()

    def _choose(self, batch: PoolBatch, members: Sequence[int], chosen: Segments) -> tuple[Tensor, list[int]]:
        """The rows of these sequences that have a vector each, and how many those are."""
        counts = not self.sparse and not batch.counted.keys().isdisjoint(members)
        if chosen is batch.segments and not counts:
            return batch.hidden, chosen.lengths
        parts = batch.hidden.split(batch.segments.lengths)
        own = [parts[i] for i in members]
        if counts:
            chosen_rows = batch.counted
            own = [
                part[chosen_rows[i]] if i in chosen_rows else part
                for i, part in zip(members, own, strict=True)
            ]
        return torch.cat(own), [len(part) for part in own]

    def finish(self, rows: Tensor, use_activation: bool | None, dimensions: int | None) -> Tensor:
        """Cut and activate rows [R, width] -> [R, the cut width]."""
        rows = rows[:, : self.cut(dimensions)]
        activates = self.activates if use_activation is None else use_activation
        return self.activation(rows) if activates else rows


class Pooler(nn.Module):
    """A pooler answers each sequence of a batch by the heads of its tasks, from one pass of the model.

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
        if params.outputs:
            return range(len(tokens))
        return self._head(params.task).rows.needed_positions(tokens, query=params.query)

    def counted_rows(self, params: PoolingLike, tokens: Sequence[int]) -> Sequence[int] | None:
        """The rows that have vectors of their own, if several heads read a sequence and not all have."""
        head = self.heads.get("token_embed")
        if not params.outputs or head is None or "token_embed" not in (params.task, *params.outputs):
            return None
        counted = head.rows.needed_positions(tokens, query=params.query)
        return None if len(counted) == len(tokens) else counted

    def width(self, params: PoolingLike) -> int:
        """The width of each vector with which `forward` answers."""
        return self._head(params.task).cut(params.dimensions)

    def forward(self, batch: PoolBatch) -> list[Tensor]:
        """Answer in the order of the batch, in float32: [D] for a merged sequence, else [K, D].

        A sequence has an answer for its task, and behind it one for each of its other outputs. A sparse head
        answers with the weights of all tokens: [V] of the vocabulary, or [L, 1] of the text.
        """
        found: dict[int, Tensor] = {}
        for (task, use_activation, dimensions), asked in _alike(batch.params).items():
            head, members = self._head(task), [member for _, member in asked]
            pooled, counts = head.pool(batch, members)
            finished = head.finish(pooled, use_activation, dimensions)
            answers = finished if head.is_merged else finished.split(counts)
            for (place, member), answer in zip(asked, answers, strict=True):
                if head.reduce is not None:
                    answer = head.reduce(answer, batch.params[member].query)
                found[place] = answer
        return [found[place] for place in range(len(found))]

    def _head(self, task: str) -> TaskHead:
        if task not in self.heads:
            raise ValueError(f"this model has no task {task!r}; it has {', '.join(sorted(self.tasks))}")
        return self.heads[task]


_Way = tuple[str, bool | None, int | None]
"""A task, and the activation and dimensions that were asked for."""


def _alike(params: Sequence[PoolingLike]) -> dict[_Way, list[tuple[int, int]]]:
    """The answers that are computed in the same way: the place of each, and the index of its sequence."""
    groups: dict[_Way, list[tuple[int, int]]] = {}
    place = 0
    for member, asked in enumerate(params):
        for task in (asked.task, *asked.outputs) if asked.outputs else (asked.task,):
            groups.setdefault((task, asked.use_activation, asked.dimensions), []).append((place, member))
            place += 1
    return groups
