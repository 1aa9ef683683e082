"""A drafter of heads that guess at once, each from the last hidden state of a sequence alone: Medusa."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from models.context import ForwardContext
from models.families.drafters.medusa import Medusa
from models.model import Forward
from worker.drafter.draft_model import DraftModel
from worker.steps.batch import Batch
from worker.steps.drafting import Newest
from worker.tables.positions import LayOut


class HeadDrafter(DraftModel):
    _read: Tensor  # [T, H] the last hidden states of a step, and then those from which it guesses [R, H]
    _head = 0
    """The head that guesses next."""

    def __init__(self, heads: Medusa, vocab_size: int, *, drawn: bool) -> None:
        super().__init__(heads, vocab_size, drawn=drawn)
        self._heads = heads

    def quicken(self, lay_out: LayOut, record: Callable[[Forward], Forward] | None) -> None:
        """Use the layout. There are no forward passes over tokens that could be replayed."""
        super().quicken(lay_out, None)

    def extend(self, batch: Batch, ids: Tensor, context: ForwardContext, hidden: Tensor) -> None:
        self._read = hidden

    def propose(self, newest: Sequence[Newest]) -> dict[int, list[int]]:
        longest_first = sorted(newest, key=lambda each: -each.count)  # later heads have the first rows alone
        self._read, self._head = self._read[[each.row for each in longest_first]], 0
        return super().propose(longest_first)

    def _guess(self, ids: Tensor, context: ForwardContext, first: int) -> Tensor:
        self._head += 1
        return self._heads(self._read[: len(ids)], self._head - 1)
