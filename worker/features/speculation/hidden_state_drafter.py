"""A drafter that reads the hidden states of the served model: EAGLE, EAGLE-3, and layers for MTP.

Its entry at a place of the cache is made of that token and of what is read of the one before it. So a step
needs what an earlier one has read of the last token: it is kept once for each slot, and for each cache block
once more, for sequences whose beginning lies in blocks that others have filled. As the entry of a token does
not depend on later ones, such blocks hold all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from models.context import ForwardContext, context, use_context
from models.families.drafters.head import DraftHead
from worker.capacity import WorkerLimits
from worker.devices.base import Device
from worker.features.speculation.draft_model import DraftModel, Newest, as_text
from worker.protocol import SeqStep
from worker.steps.batch import Batch
from worker.tables.slots import Slots


class HiddenDrafter(DraftModel):
    _of_slots: Tensor  # [slots, width] what was read of the last token that is true
    _of_blocks: Tensor  # [blocks, width] what was read of the last token of each
    _read: Tensor  # [T, width] what is read of the tokens before those of the next forward pass

    def __init__(self, head: DraftHead, vocab_size: int, device: Device, *, drawn: bool) -> None:
        super().__init__(head, vocab_size, device, drawn=drawn)
        self._head, self._forward = head, self._pass
        self._layer = head.attention_layers()[0]
        self._kept: list[int] = []
        """The position whose row is kept for each slot; -1 means that none is."""

    def block_bytes(self, longest: int) -> int:
        return self._head.width * self._head.dtype.itemsize

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        super().open(limits, slots, blocks)
        made = {"dtype": self._head.dtype, "device": slots.tokens.device}
        self._kept = [-1] * (slots.count + 1)
        self._of_slots = torch.zeros(len(self._kept), self._head.width, **made)
        self._of_blocks = torch.zeros(len(self._layer.cache_parts()[0]), self._head.width, **made)
        return [self._of_blocks]

    def make_stream(self, tokens: int) -> Tensor:
        """The place of what is read of the tokens before those of a pass."""
        return torch.zeros(tokens, self._head.width, dtype=self._head.dtype, device=self._slots.tokens.device)

    def extend(self, batch: Batch, ids: Tensor, context: ForwardContext, hidden: Tensor) -> None:
        read = self._head.read(hidden, context.streams or [])
        self._read = read.roll(1, 0)
        self._take_kept(batch)
        self._compute(ids, as_text(context))
        self._keep(batch, context, read)
        self._read = read

    def propose(self, newest: Sequence[Newest]) -> dict[int, list[int]]:
        longest_first = sorted(newest, key=lambda each: -each.count)  # later passes have the first rows alone
        self._read = self._read[[each.row for each in longest_first]]
        return super().propose(longest_first)

    def _compute(self, ids: Tensor, context: ForwardContext) -> Tensor:
        with use_context(context):
            self._read = self._forward(ids, context.positions, self._read[: len(ids)])
        return self._read

    def _pass(self, ids: Tensor, positions: Tensor, stream: Tensor | None) -> Tensor:
        """A forward pass in the current step: its tokens turn as those before them, and place 0 is empty."""
        with _place_0_hidden(context()):
            return self._head(ids, positions - 1, stream)

    def _take_kept(self, batch: Batch) -> None:
        """Put what earlier steps have read of the token before each sequence's first one in its place."""
        slots, firsts, first = self._slots, [], 0
        for new in batch.asked.new:
            self._kept[new.slot] = -1
        for seq in batch.asked.seqs:
            firsts.append(first)
            first += seq.tokens
        self._read[firsts] = self._of_slots[[seq.slot for seq in batch.asked.seqs]]
        for seq, first in zip(batch.asked.seqs, firsts, strict=True):
            if seq.start == 0:
                self._read[first] = 0  # nobody reads this entry, but what it holds must be finite
            elif self._kept[seq.slot] != seq.start - 1:
                table = slots.block_tables[self._layer.group, seq.slot]
                self._read[first] = self._of_blocks[table[(seq.start - 1) // slots.block_size]]

    def _keep(self, batch: Batch, context: ForwardContext, read: Tensor) -> None:
        """Keep the rows of the last tokens of sequences, as far as guesses hold, and of blocks."""
        slots, lasts, first = self._slots, [], 0
        written = self._written(batch.asked.seqs)
        for seq in batch.asked.seqs:
            end, held = seq.start + seq.count, 0
            if seq.guesses:
                held = seq.count_held([next(written) for _ in seq.guesses])
            lasts.append(first + seq.count - 1 + held)
            self._kept[seq.slot] = end - 1 + held
            first += seq.tokens
        self._of_slots[[seq.slot for seq in batch.asked.seqs]] = read[lasts]
        own, size = (context, *context.others)[self._layer.group], slots.block_size
        ends = ((context.positions[: len(read)] + 1) % size == 0).nonzero().flatten()
        self._of_blocks[own.slot_mapping[ends] // size] = read[ends]

    def _written(self, seqs: Sequence[SeqStep]) -> Iterator[int]:
        """The tokens that stand in the places of all guesses, now that the step has sampled."""
        width = self._slots.width
        places = [
            seq.slot * width + seq.start + seq.count + at for seq in seqs for at in range(len(seq.guesses))
        ]
        return iter(self._slots.tokens.view(-1)[places].tolist() if places else [])


@contextmanager
def _place_0_hidden(step: ForwardContext) -> Iterator[None]:
    """Let attention in a step begin at place 1, where the first entry of a drafter lies."""
    for each in (step, *step.others):
        each.first = 1
    try:
        yield
    finally:
        for each in (step, *step.others):
            each.first = 0
