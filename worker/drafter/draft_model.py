"""A drafter that is a smaller model of the same vocabulary: it writes the next tokens by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from torch import Tensor

from models.context import ForwardContext, use_context
from models.families.drafters.head import DraftHead
from models.layers.attention import CachedAttention
from models.model import Forward, ServedModel
from worker.protocol import SeqStep
from worker.sampling.grouped_logits import Scan
from worker.sampling.sampler import GREEDY, SamplingPlan, plan_sampling, sample
from worker.sampling.top_k_top_p import Draw
from worker.steps.batch import Batch
from worker.steps.drafting import Newest
from worker.tables.positions import Columns, LayOut, lay_out
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet


class DraftModel:
    """A model that generates. Its steps for guesses have a single token of each sequence."""

    _slots: Slots
    _packet: Packet
    _scan: Scan
    _draw: Draw

    block_bytes = 0

    def __init__(self, model: ServedModel | DraftHead, vocab_size: int, *, drawn: bool) -> None:
        """`drawn`: guesses are drawn by each request's own options and numbers; else they are likeliest."""
        self._model, self._vocab_size, self._drawn = model, vocab_size, drawn
        self._forward = cast("Forward", model.forward)
        self._lay_out: LayOut = lay_out

    def attention_layers(self) -> Sequence[CachedAttention]:
        return self._model.attention_layers()

    def parameters(self) -> Iterator[Tensor]:
        return self._model.parameters()

    def begin(self, slots: Slots, packet: Packet, scan: Scan, draw: Draw) -> None:
        self._slots, self._packet, self._scan, self._draw = slots, packet, scan, draw

    def quicken(self, lay_out: LayOut, record: Callable[[Forward], Forward] | None) -> None:
        self._lay_out = lay_out
        if record is not None:
            self._forward = record(self._forward)

    def extend(self, batch: Batch, ids: Tensor, context: ForwardContext, hidden: Tensor) -> None:
        self._compute(ids, as_text(context))

    def propose(self, newest: Sequence[Newest]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {each.slot: [] for each in newest}
        for at in range(max(each.count for each in newest)):
            rows = [
                SeqStep(each.slot, each.position + at, 1, [], True, each.output_index + at)
                for each in newest
                if at < each.count
            ]
            for row, token in zip(rows, self._step(rows), strict=True):
                drafts[row.slot].append(token)
        return drafts

    def _step(self, rows: list[SeqStep]) -> list[int]:
        """Compute single tokens, and write what follows them into the table -> the tokens that follow."""
        slots, packet, columns = self._slots, self._packet, Columns.of(rows)
        packet.reset()
        finish, plan = self._lay_out(columns, slots, packet), self._plan(columns, rows)
        flat = packet.ints(
            [slot * slots.width + end for slot, end in zip(columns.slots, columns.ends, strict=True)]
        )
        packet.send()
        ids, context = finish()
        logits = self._model.logits(self._compute(ids, context))
        tokens = sample(logits, plan, slots.tokens, self._scan, draw=self._draw).tokens
        slots.tokens.view(-1)[flat] = tokens
        return tokens.tolist()

    def _compute(self, ids: Tensor, context: ForwardContext) -> Tensor:
        with use_context(context):
            return self._forward(ids, context.positions, None)

    def _plan(self, columns: Columns, rows: list[SeqStep]) -> SamplingPlan:
        if not self._drawn or self._slots.demanding.isdisjoint(columns.slots):
            return GREEDY
        index = np.array([row.output_index for row in rows], np.int64)
        chosen = SampleRows(np.array(columns.slots), np.array(columns.ends), index)
        return replace(plan_sampling(self._packet, self._slots, chosen, self._vocab_size), logprobs=[])


def as_text(step: ForwardContext) -> ForwardContext:
    """The same step for a model of text alone, where a token has one position and sees those before it."""
    if step.media is None and step.axes is None and step.last is None:
        return step
    others = [as_text(each) for each in step.others]
    return replace(step, media=None, axes=None, last=None, whole=None, others=others)
