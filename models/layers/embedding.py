"""The vocabulary at both ends of a model: token embeddings and the LM head, spread over the ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.files import Cut
from models.checkpoint.weights import Weights
from models.layers.linear import frozen
from models.parallel.parallel import Parallel
from models.parallel.shares import Span


class Embedding(nn.Module):
    """Token ids [T] -> [T, size]. The vocabulary need not divide evenly: shares are filled with zeros.

    Tokens are embedded by the first stage: the others hold nothing. `path` is the scope of the matrix in the
    checkpoint, in which a tied head finds its rows.
    """

    weight: nn.Parameter
    path: str

    def __init__(self, vocab_size: int, size: int, parallel: Parallel, *, scale: float = 1.0) -> None:
        super().__init__()
        self.span = parallel.share_padded(vocab_size)
        self.size = size
        self.parallel = parallel
        self.scale = scale

    def pull(self, weights: Weights) -> None:
        self.path = weights.path
        if not self.parallel.first:
            weights.ignore("weight")
            return
        self.weight = frozen(_take_share(weights, self.span, self.size, self.parallel))
        # The scale has the number type of the embeddings: Gemma was trained with its root in bfloat16.
        self.scale = torch.tensor(self.scale, dtype=self.weight.dtype).item()

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._look_up(ids)
        return rows if self.scale == 1.0 else ops.scale(rows, self.scale)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self.span.is_whole:
            return ops.embed(ids, self.weight)
        elsewhere = (ids < self.span.start) | (ids >= self.span.stop)  # [T]
        rows = F.embedding((ids - self.span.start).masked_fill(elsewhere, 0), self.weight)
        # To add -0 changes no number: 0 would change -0.
        return self.parallel.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), -0.0))


class LMHead(nn.Module):
    """Hidden states [R, size] -> logits [R, vocab_size] float32.

    `tied` says that its matrix is that of `embedding`; None means that it is if the checkpoint has none here.
    If `tokens` are given, only their rows are held, in float32 and on every rank, and the logits are
    [R, tokens]; for no tokens nothing is held. Stages before the last hold nothing either.
    """

    weight: nn.Parameter

    def __init__(
        self,
        vocab_size: int,
        size: int,
        parallel: Parallel,
        *,
        embedding: Embedding,
        tied: bool | None,
        tokens: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.span = parallel.share_padded(vocab_size)
        self.size = size
        self.parallel = parallel
        self.tied = tied
        self.tokens = tokens
        # The tuple hides the embedding, which would be registered as a part of the head too.
        self._embedding = (embedding,)

    def pull(self, weights: Weights) -> None:
        tied = self.tied or (self.tied is None and "weight" not in weights)
        if tied or self.tokens is not None or not self.parallel.last:
            weights.ignore("weight")
        if not self.parallel.last:
            return
        (embedding,) = self._embedding
        source = weights.at(embedding.path) if tied else weights
        if self.tokens is None:
            is_there = tied and self.parallel.first
            share = embedding.weight if is_there else _take_share(source, self.span, self.size, self.parallel)
            self.weight = frozen(ops.pack(share, wide=True))
        elif self.tokens:
            self.weight = frozen(_take_rows(source, self.tokens, self.span.size, self.size))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.tokens is not None:
            return F.linear(hidden.float(), self.weight)
        mine = ops.linear(hidden, self.weight, wide=True)  # [R, rows of the share]
        return self.parallel.all_gather(mine)[:, : self.span.size]


def _take_rows(weights: Weights, tokens: tuple[int, ...], vocab_size: int, size: int) -> Tensor:
    """Read the rows of `tokens` on every rank: [tokens, size] float32."""
    cuts = [Cut(0, token, token + 1) for token in tokens]
    return torch.cat([weights.take("weight", [vocab_size, size], cut, torch.float32) for cut in cuts])


def _take_share(weights: Weights, span: Span, size: int, parallel: Parallel) -> Tensor:
    """Read this rank's rows of a [vocabulary, size] matrix: the same number for every rank."""
    cut = None if span.is_whole else Cut(0, span.start, span.stop)
    rows = weights.take("weight", [span.size, size], cut)
    missing = parallel.padded_length(span.size) - span.length
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
