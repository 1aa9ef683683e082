"""A drafter of heads that guess at once, each from the last hidden state of a sequence alone: Medusa."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from models.context import ForwardContext
from models.families.drafters.medusa import Medusa
from worker.drafter.draft_model import DraftModel
from worker.steps.batch import Batch
from worker.steps.drafting import Newest


class HeadDrafter(DraftModel):
    _read: Tensor  # [T, H] the last hidden states of a step, and then those from which it guesses [R, H]
    _head = 0
    """The head that guesses next."""

    def __init__(self, heads: Medusa, vocab_size: int, *, drawn: bool) -> None:
        super().__init__(heads, vocab_size, drawn=drawn)
        self._heads = heads

    @property
    def has_passes(self) -> bool:
        return False

    def extend(self, batch: Batch, ids: Tensor, context: ForwardContext, hidden: Tensor) -> None:
        self._read = hidden

    def propose(self, newest: Sequence[Newest]) -> dict[int, list[int]]:
        longest_first = sorted(newest, key=lambda each: -each.count)  # later heads have the first rows alone
        self._read, self._head = self._read[[each.row for each in longest_first]], 0
        return super().propose(longest_first)

    def _guess(self, ids: Tensor, context: ForwardContext, first: int) -> Tensor:
        self._head += 1
        return self._heads(self._read[: len(ids)], self._head - 1)
