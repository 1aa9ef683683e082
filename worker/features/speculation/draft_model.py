"""Drafters as a feature: a smaller model of the same vocabulary, which writes the next tokens by itself.

A drafter follows every step, and keeps entries of its own in the same cache blocks. So chunks of prompts,
shared prefixes and preemption are as right for it as for the served model. Its guesses go up with the output
of a step and come down again with a later one: the worker keeps none.

Behind k guesses it has entries of its newest token and of all guesses but the last. If the next step verifies
these guesses, nothing is left to do but for the last one, if all hold: it is computed together with the token
that follows it, when the drafter guesses again. So a step with guesses costs k passes and not k + 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import numpy as np
from torch import Tensor

from models.context import ForwardContext, use_context
from models.families.drafters.head import DraftHead
from models.layers.attention import CachedAttention
from models.model import Forward, ServedModel
from worker.capacity import WorkerLimits
from worker.devices.base import Device
from worker.protocol import SeqStep, StepInput, StepOutput
from worker.sampling.sampler import GREEDY, SamplingPlan, plan_sampling, sample
from worker.steps.batch import Batch, Launched, Outcome
from worker.steps.feature import Feature, Passes
from worker.tables.positions import Columns, LayOut, lay_out
from worker.tables.slots import SampleRows, Slots
from worker.tables.staging import Packet


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest token of a sequence, which a step has sampled, and what is asked for behind it."""

    slot: int
    position: int
    row: int
    """The token of the step, among all T, from whose hidden state it was sampled."""
    output_index: int
    """The index that the first guess would have among the output tokens."""
    count: int
    """The number of guesses."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """The output of a step, with guesses for the next one."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class DraftModel(Feature):
    """A model that generates. Its steps for guesses have a single token of each sequence."""

    _model: Any
    _slots: Slots
    _packet: Packet

    def __init__(
        self, model: ServedModel | DraftHead, vocab_size: int, device: Device, *, drawn: bool
    ) -> None:
        """`drawn`: guesses are drawn by each request's own options and numbers; else they are likeliest."""
        self._model, self._vocab_size, self._device, self._drawn = model, vocab_size, device, drawn
        self._forward = cast("Forward", model.forward)
        self._lay_out: LayOut = lay_out
        self._drafts: dict[int, tuple[int, list[int]]] = {}
        """slot -> the position of the newest token when guesses were last made for it, and the guesses."""
        self._left: dict[int, int] = {}
        """slot -> the position of a last guess without an entry, which is needed if the guess holds."""

    def weights(self) -> Iterable[Tensor]:
        return self._model.parameters()

    def attention_layers(self) -> Sequence[CachedAttention]:
        return self._model.attention_layers()

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        self._slots, self._packet = slots, Packet(self._device.staging_buffer, limits.staged_words)
        return ()

    def passes(self) -> Passes:
        return self

    def follow(self, batch: Batch, ids: Tensor, step: ForwardContext, outcome: Outcome) -> Outcome:
        self.extend(batch, ids, step, outcome.hidden)
        return outcome

    def finish(self, step: StepInput, launched: Launched) -> Launched:
        """Let the drafter guess behind the sequences of a step for which it is asked."""
        if not [seq for seq in step.seqs if seq.proposes]:
            return launched
        output = launched.result()
        began = time.perf_counter()
        newest: list[Newest] = []
        first = 0
        for seq, token in zip(step.seqs, output.tokens, strict=True):
            if seq.proposes and token >= 0:
                held = len(output.held.get(seq.slot, ()))
                position, row = seq.start + seq.count + held, first + seq.count - 1 + held
                newest.append(Newest(seq.slot, position, row, seq.output_index + held + 1, seq.proposes))
            first += seq.tokens
        drafts = self.propose(newest) if newest else {}
        proposing = time.perf_counter() - began
        return Proposed(msgspec.structs.replace(output, drafts=drafts, proposing=proposing))

    def make_stream(self, tokens: int) -> Tensor | None:
        """Return None: a model reads tokens alone."""
        return None

    def quicken(self, lay_out: LayOut, record: Callable[[Forward], Forward] | None) -> None:
        self._lay_out = lay_out
        if record is not None:
            self._forward = record(self._forward)

    def extend(self, batch: Batch, ids: Tensor, context: ForwardContext, hidden: Tensor) -> None:
        for new in batch.asked.new:
            self._drafts.pop(new.slot, None)
        self._left.clear()
        if not all(self._has_entries(seq) for seq in batch.asked.seqs):
            self._compute(ids, as_text(context))
            self._left.clear()

    def _has_entries(self, seq: SeqStep) -> bool:
        """Whether a row verifies guesses whose entries are there, but for the last, and asks for others."""
        start, draft = self._drafts.get(seq.slot, (-1, []))
        if not seq.proposes or seq.start != start or seq.guesses != draft[: len(seq.guesses)]:
            return False
        if len(seq.guesses) == len(draft):
            self._left[seq.slot] = start + len(draft)
        return True

    def propose(self, newest: Sequence[Newest]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {each.slot: [] for each in newest}
        left = [each for each in newest if self._left.get(each.slot) == each.position - 1]
        first = [_row(each, -1) for each in left]
        for at in range(max(each.count for each in newest)):
            rows = [_row(each, at) for each in newest if at < each.count]
            for row, token in zip(rows, self._step(first, rows), strict=True):
                drafts[row.slot].append(token)
            first = []
        self._drafts |= {each.slot: (each.position, drafts[each.slot]) for each in newest}
        return drafts

    def _step(self, first: list[SeqStep], rows: list[SeqStep]) -> list[int]:
        """Compute single tokens, and write into the table what follows those of `rows` -> these tokens."""
        slots, packet = self._slots, self._packet
        packet.reset()
        finish, plan = self._lay_out(Columns.of(first + rows), slots, packet), self._plan(rows)
        flat = packet.ints([row.slot * slots.width + row.start + 1 for row in rows])
        packet.send()
        ids, context = finish()
        logits = self._model.logits(self._compute(ids, context)[len(first) :])
        tokens = sample(logits, plan, slots.tokens, self._device.scan, draw=self._device.draw).tokens
        slots.tokens.view(-1)[flat] = tokens
        return tokens.tolist()

    def _compute(self, ids: Tensor, context: ForwardContext) -> Tensor:
        with use_context(context):
            return self._forward(ids, context.positions, None)

    def _plan(self, rows: list[SeqStep]) -> SamplingPlan:
        held = [row.slot for row in rows]
        if not self._drawn or self._slots.demanding.isdisjoint(held):
            return GREEDY
        index = np.array([row.output_index for row in rows], np.int64)
        chosen = SampleRows(np.array(held), np.array([row.start + 1 for row in rows]), index)
        return replace(plan_sampling(self._packet, self._slots, chosen, self._vocab_size), logprobs=[])


def _row(newest: Newest, at: int) -> SeqStep:
    """The token that comes so many places behind the newest one."""
    return SeqStep(newest.slot, newest.position + at, 1, [], True, newest.output_index + at)


def as_text(step: ForwardContext) -> ForwardContext:
    """The same step for a model of text alone, where a token has one position and sees those before it."""
    if step.media is None and step.axes is None and step.last is None:
        return step
    others = [as_text(each) for each in step.others]
    return replace(step, media=None, axes=None, last=None, whole=None, others=others)
