"""The vocabulary at both ends of a model: token embeddings and the LM head, spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.context import AdapterRows, context
from models.layers.linear import Place, cut_of, frozen
from models.ops.grouped_matrix import Grouped, Matrix, widen
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span
from models.quantization.matrices import (
    has_matrix,
    ignore_matrix,
    read_embeddings,
    read_matrix,
    read_plain_matrix,
)
from models.weight_slices import Cut


class Embedding(nn.Module):
    """Token ids [T] -> [T, size]. The vocabulary need not divide evenly: shares are filled with zeros.

    Tokens are embedded by the first stage, and by the last one for a drafter: the others hold nothing. `path`
    is the scope of the matrix in the checkpoint, in which a tied head finds its rows.
    """

    weight: nn.Parameter
    path: str
    packed: bool
    """Whether the matrix is quantized, and so in the form that a tied head multiplies with."""
    places: Sequence[Place] = ()
    """The columns that are held of its matrix; nothing if it can have no adapters."""
    adapters: Any = None  # those that `ops.adapt_embeddings` takes; None: there can be none
    transposed = False

    def __init__(
        self,
        vocab_size: int,
        size: int | Span,
        parallel: Parallel,
        *,
        scale: float = 1.0,
        plain: bool = False,
    ) -> None:
        """`plain`: others read its rows too, as numbers, so a quantized matrix is widened.

        `size` may be the piece of each row that is held, where others hold the rest.
        """
        super().__init__()
        self.plain = plain
        self.span = parallel.share_padded(vocab_size)
        self.columns = size if isinstance(size, Span) else Span.whole(size)
        self.size = self.columns.length
        self.parallel = parallel
        self.scale = scale

    @property
    def inputs(self) -> Span:
        return self.span

    @property
    def widths(self) -> list[int]:
        return [self.size]

    def pull(self, weights: Weights) -> None:
        self.path = weights.path
        if not self.parallel.embeds:
            weights.ignore("weight")
            return
        shape, columns = (self.span.size, self.columns.size), cut_of(1, self.columns)
        rows = read_embeddings(weights, shape, cut_of(0, self.span) or columns)
        if columns is not None and not self.span.is_whole:
            rows = columns.of(widen(rows)).contiguous()  # no reader cuts both ways
        rows = _pad(rows, self.parallel.padded_length(self.span.size) - self.span.length)
        self.packed = isinstance(rows, Grouped) and not self.plain
        self.weight = frozen(ops.pack(rows, wide=True) if self.packed else widen(rows))
        # The scale has the number type of the embeddings: Gemma was trained with its root in bfloat16.
        self.scale = torch.tensor(self.scale, dtype=weights.dtype).item()
        self.places = [Place(weights.path, self.columns, None)]

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._look_up(ids)
        return rows if self.scale == 1.0 else ops.scale(rows, self.scale)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self.span.is_whole:
            return self._rows(ids)
        elsewhere = (ids < self.span.start) | (ids >= self.span.stop)  # [T]
        rows = self._rows((ids - self.span.start).masked_fill(elsewhere, 0))
        # To add -0 changes no number: 0 would change -0.
        return self.parallel.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), -0.0))

    def _rows(self, ids: Tensor) -> Tensor:
        """The rows that are held of ids, as adapters of the step's tokens change them."""
        rows = ops.embed(ids, self.weight)
        if self.adapters is None or (adapted := context().adapters) is None:
            return rows
        return ops.adapt_embeddings(rows, ids, self.adapters, adapted)


class TokenEmbedding(Embedding):
    """The embeddings of a step's tokens [T, size], among which those of media have their places."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        media = context().media
        return rows if media is None else rows.index_copy(0, media.places, media.rows)


class LMHead(nn.Module):
    """Hidden states [R, size] -> logits [R, vocab_size] float32.

    `tied` says that its matrix is that of `embedding`; None means that it is if the checkpoint has none here.
    If `tokens` are given, only their rows are held, in float32 and on every rank, and the logits are
    [R, tokens]; for no tokens nothing is held. Stages before the last hold nothing either.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # [vocab_size] or [tokens] float32
    path: str
    """Its scope in the checkpoint, and `source`, that of its matrix."""
    source: str
    places: Sequence[Place] = ()
    """The rows that are held of its matrix, under its own name; nothing if it can have no adapters."""
    adapters: Any = None  # those that `ops.lora` takes; None: there can be none
    adapted: AdapterRows | None = None
    """The adapters of the rows that come next; None: none of them changes this layer."""
    transposed = False

    def __init__(
        self,
        vocab_size: int,
        size: int,
        parallel: Parallel,
        *,
        embedding: Embedding,
        tied: bool | None,
        tokens: tuple[int, ...] | None = None,
        bias: bool = False,
    ) -> None:
        """`bias`: whether the checkpoint has a number to add to each logit."""
        super().__init__()
        self.has_bias = bias
        self.bias = None
        self.span = parallel.share_padded(vocab_size)
        self.size = size
        self.parallel = parallel
        self.tied = tied
        self.tokens = tokens
        # The tuple hides the embedding, which would be registered as a part of the head too.
        self._embedding = (embedding,)

    @property
    def inputs(self) -> Span:
        return Span.whole(self.size)

    @property
    def widths(self) -> list[int]:
        """The number of rows that this rank holds, those that fill up among them."""
        return [self.parallel.padded_length(self.span.size)]

    def pull(self, weights: Weights) -> None:
        self.path = weights.path
        tied = self.tied or (self.tied is None and not has_matrix(weights))
        if tied or self.tokens is not None or not self.parallel.last:
            ignore_matrix(weights)
        if not self.parallel.last or self.tokens == ():
            weights.ignore("bias")
            return
        if self.has_bias:
            bias = weights.take("bias", [self.span.size], dtype=torch.float32)
            self.bias = frozen(bias if self.tokens is None else bias[list(self.tokens)])
        (embedding,) = self._embedding
        source = weights.at(embedding.path) if tied else weights
        self.source = source.path
        if self.tokens is None:
            self.places = [Place(weights.path, self.span, None)]
            is_there = tied and self.parallel.embeds
            if is_there and embedding.packed:
                self.weight = embedding.weight
            else:
                share = embedding.weight if is_there else self._take_share(source, tied=bool(tied))
                self.weight = frozen(ops.pack(share, wide=True))
        else:
            cuts = [Cut(0, token, token + 1) for token in self.tokens]
            rows = [
                read_plain_matrix(source, (self.span.size, self.size), cut, torch.float32) for cut in cuts
            ]
            self.weight = frozen(torch.cat(rows))

    def _take_share(self, weights: Weights, *, tied: bool) -> Matrix:
        """Read this rank's rows of the head's own matrix, or of the embedding's."""
        shape, cut = (self.span.size, self.size), cut_of(0, self.span)
        rows = read_embeddings(weights, shape, cut) if tied else read_matrix(weights, shape, cut)
        return _pad(rows, self.parallel.padded_length(self.span.size) - self.span.length)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.tokens is not None:
            return F.linear(hidden.float(), self.weight, self.bias)
        rows = self.adapted
        added: dict[str, Any] = {} if rows is None else {"added": ops.lora(hidden, self.adapters, rows)}
        mine = ops.linear(hidden, self.weight, wide=True, **added)  # [R, rows of the share]
        logits = mine if self.parallel.size == 1 else self.parallel.all_gather(mine)
        logits = logits[:, : self.span.size]
        return logits if self.bias is None else logits + self.bias


def check_learned_positions(model: str, learned: int, max_len: int) -> None:
    """Refuse texts that are longer than a model's table of positions."""
    if max_len > learned:
        raise ValueError(
            f"{model} has learned {learned} positions, and cannot serve {max_len}: "
            f"lower --max-model-len to {learned}"
        )


def _pad(rows: Matrix, missing: int) -> Matrix:
    """Fill up a rank's rows with zeros, so that every rank has the same number."""
    if not missing:
        return rows
    return rows.padded(missing) if isinstance(rows, Grouped) else F.pad(rows, (0, 0, 0, missing))
