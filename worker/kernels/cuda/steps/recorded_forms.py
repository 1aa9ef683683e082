"""The forms in which steps are sent to a device that has recorded such steps, and what it knows of each slot.

A form has a few sizes; what a smaller step leaves over belongs to the slot that is nobody's. A recorded step
of single tokens reads lengths and options in a table on the device and counts on by itself, so that it is
told its slots alone. Every other step writes the rows of its own sequences there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from worker.protocol import SeqStep, StepInput
from worker.sampling.sampler import GREEDY, SampleTargets
from worker.steps.batch import Staged
from worker.tables.adapter_rows import AdapterReads, numbers_of
from worker.tables.positions import Columns, LayOut, StepTokens
from worker.tables.random_bits import stream
from worker.tables.slots import PROGRESS_WORDS, Slots
from worker.tables.staging import Column, Packet
from worker.tables.state_rows import StateReads

LENGTH, INDEX, TOP_K, TEMPERATURE, TOP_P, MIN_P, STREAM = range(7)
SHIFT = STREAM + 2
"""The words of a row. Temperature, top_p and min_p are bits of float32; the stream of points has 64 bits.
The shift is that of `Slots`. Words behind it mean nothing."""


class SlotProgress:
    """The table of what recorded steps must know of each slot, and what the host knows of its content."""

    def __init__(self, slots: Slots) -> None:
        rows = slots.count + 1
        self.table = slots.progress
        self._slots = slots
        self._lengths, self._indices = np.full((2, rows), -1, np.int64)
        """The lengths and counts of output tokens that the table has; -1 where that is not known."""

    def after(self, seqs: Sequence[SeqStep]) -> tuple[np.ndarray, np.ndarray]:
        """Note what holds after a step: places in the memory of all tables, and the words to write there."""
        slots, held = self._slots, np.array([seq.slot for seq in seqs], np.int64)
        self._lengths[held] = [seq.start + seq.count for seq in seqs]
        self._indices[held] = [seq.output_index + seq.samples for seq in seqs]
        words = np.zeros((len(held), PROGRESS_WORDS), np.int32)
        words[:, LENGTH], words[:, INDEX] = self._lengths[held], self._indices[held]
        words[:, TOP_K] = slots.top_k[held]
        for word, values in ((TEMPERATURE, slots.temperature), (TOP_P, slots.top_p), (MIN_P, slots.min_p)):
            words[:, word] = values[held].view(np.int32)
        words[:, SHIFT] = slots.shift[held]
        words[:, STREAM:SHIFT] = stream(slots.seed[held]).view(np.int32).reshape(-1, 2)
        flat = held[:, None] * PROGRESS_WORDS + np.arange(PROGRESS_WORDS)
        return flat.reshape(-1), words.reshape(-1)

    def knows(self, seqs: Sequence[SeqStep]) -> bool:
        """Whether the table has the lengths and counts with which a step begins."""
        held = [seq.slot for seq in seqs]
        starts, indices = [seq.start for seq in seqs], [seq.output_index for seq in seqs]
        return bool((self._lengths[held] == starts).all() and (self._indices[held] == indices).all())

    def advance(self, held: Sequence[int]) -> None:
        """Note that a recorded step counts on by itself in these slots."""
        self._lengths[held] += 1
        self._indices[held] += 1

    def forget(self, held: Sequence[int] | slice = slice(None)) -> None:
        """Believe nothing of the table any more, for some slots or all: nobody knows how far they got."""
        self._lengths[held] = -1


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a step in which every row computes one token and samples."""

    rows: int
    whole: bool
    """Whether tokens are chosen in the recording, too, which else ends with the logits."""
    adapted: bool = False
    """Whether tokens may have adapters."""


@dataclass(frozen=True, slots=True)
class MixedForm:
    """The form of a step of up to so many tokens of any rows."""

    tokens: int
    whole: bool
    """Whether tokens are chosen in the recording, too, which else ends with the hidden states."""
    adapted: bool = False
    """Whether tokens may have adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedForm(Staged):
    """A recorded step at the beginning of a packet."""

    form: Form | MixedForm


class Forms(Protocol):
    """The recordings of a device."""

    progress: SlotProgress
    chooses: bool
    """Whether recordings can choose tokens; else a later stage of the model does."""
    draws: bool
    """Whether recordings draw tokens at random."""
    buffer: Tensor
    """Where forms lie on the device, int32."""

    @property
    def lay_out(self) -> LayOut:
        """The layout of steps that are not recorded."""
        ...

    def find(self, rows: int, *, whole: bool, adapted: bool) -> Form | None:
        """The smallest recorded form that has so many rows, if that is not far too large."""
        ...

    def stage_mixed(self, columns: Columns, sampling: Sequence[int], packet: Packet) -> StagedForm | None:
        """Begin a packet with the form of any step, if one is recorded that is not far too large.

        `sampling`: the rows that sample, if recordings can choose all their tokens.
        """
        ...


def begin_step(
    forms: Forms, slots: Slots, asked: StepInput, step: StepInput, columns: Columns, packet: Packet
) -> Staged:
    """Begin a packet with the form of a recorded step that has all of it, or as any step is laid out.

    `asked`: the step without the rows of guesses.
    """
    if step.fresh:
        forms.progress.forget()
    if (
        step is asked
        and not step.new
        and all(each.in_single for each in columns.reads)
        and (form := find_form(forms, step.seqs, columns, slots)) is not None
    ):
        return send_form(forms, form, step.seqs, columns, slots, packet)
    words = [forms.progress.after(known)] if (known := _single_rows(forms, asked, step, slots)) else []
    sampling = columns.sampling
    if not can_choose(forms, [step.seqs[row] for row in sampling], slots):
        sampling = []
    if (
        all(each.in_mixed for each in columns.reads)
        and (mixed := forms.stage_mixed(columns, sampling, packet)) is not None
    ):
        return replace(mixed, words=words, sampled=_sampled_by(forms, columns) if mixed.form.whole else None)
    return Staged(forms.lay_out(columns, slots, packet), words=words)


def _single_rows(forms: Forms, asked: StepInput, step: StepInput, slots: Slots) -> list[SeqStep]:
    """Find the rows of sequences that are not pooled; how far one with several gets, nobody knows yet."""
    generating = [seq for seq in asked.seqs if slots.pooling[seq.slot] is None]
    if step is asked:
        return generating
    rows = Counter(seq.slot for seq in step.seqs)
    forms.progress.forget([slot for slot, count in rows.items() if count > 1])
    return [seq for seq in generating if rows[seq.slot] == 1]


def _sampled_by(forms: Forms, columns: Columns) -> SampleTargets:
    """The rows that sample in a step whose recording chooses their tokens, and writes them itself."""
    return SampleTargets(None, forms.buffer[:0], columns.sampling, GREEDY, {})


def find_form(forms: Forms, seqs: Sequence[SeqStep], columns: Columns, slots: Slots) -> Form | None:
    """The form in which a step without new sequences can be sent, if it computes one token of each."""
    if any(seq.count != 1 or not seq.samples or len(seq.blocks) > slots.groups for seq in seqs):
        return None
    whole = can_choose(forms, seqs, slots)
    form = forms.find(len(seqs), whole=whole, adapted=columns.find(AdapterReads) is not None)
    return form if form is not None and forms.progress.knows(seqs) else None


def can_choose(forms: Forms, sampling: Sequence[SeqStep], slots: Slots) -> bool:
    """Whether a recording can choose the tokens of rows that sample: no logits are masked or reported.

    It counts the tokens of a slot in the table on the device, so that no slot may have two rows.
    """
    held = [seq.slot for seq in sampling]
    if not forms.chooses or slots.changes_logits or len(set(held)) < len(held):
        return False
    asks = slots.masked[held] | slots.penalised[held] | slots.filtered[held] | slots.logprobs[held]
    if not forms.draws:
        asks |= slots.temperature[held] > 0
    return not asks.any() and not any(seq.bound for seq in sampling)


def send_form(
    forms: Forms,
    form: Form,
    seqs: Sequence[SeqStep],
    step: Columns,
    slots: Slots,
    packet: Packet,
) -> StagedForm:
    """Begin a packet with a form: slots, and for each the next entry of its block tables, -1 for none.

    If layers have states, their places follow, and then the numbers of adapters, if the form has some.
    """
    held = [seq.slot for seq in seqs]
    places = [slots.blocks[seq.slot] if seq.blocks else -1 for seq in seqs]
    entries = [slots.entries(seq) for seq in seqs]
    groups = [[own[group][0] if own[group] else 0 for own in entries] for group in range(slots.groups)]
    for seq in seqs:
        slots.blocks[seq.slot] += len(seq.blocks) // slots.groups
    fields = (held, slots.dummy), (places, -1), *((blocks, 0) for blocks in groups)
    columns = [Column(values, fill, form.rows) for values, fill in fields]
    if states := step.find(StateReads):
        words = states.words(form.rows, slots.dummy)
        columns.append(Column(words, 0, len(words)))
    if adapters := step.find(AdapterReads):
        columns.append(Column(numbers_of(adapters.runs, len(seqs))[: len(seqs)], 0, form.rows))
    packet.begin_form(forms.buffer, columns)
    forms.progress.advance(held)
    sampled = _sampled_by(forms, step) if form.whole else None
    return StagedForm(_not_laid_out, brings_blocks=True, sampled=sampled, form=form)


def _not_laid_out() -> StepTokens:
    raise ValueError("a step was sent as a form, and nobody replays it")
