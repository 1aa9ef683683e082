"""The forms in which steps are sent to a device that has recorded such steps.

A form has a few sizes. What a smaller step leaves over belongs to the slot that is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.protocol import SeqStep
from worker.tables.positions import Columns, StepTokens
from worker.tables.slots import Slots
from worker.tables.staging import Column, Packet
from worker.tables.states import States


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a step in which every row computes one token and samples."""

    rows: int
    whole: bool
    """Whether tokens are chosen in the recording, too, which else ends with the logits."""


@dataclass(frozen=True, slots=True)
class MixedForm:
    """The form of a step of up to so many tokens of any rows."""

    tokens: int
    whole: bool
    """Whether tokens are chosen in the recording, too, which else ends with the hidden states."""


@dataclass(frozen=True, slots=True)
class StagedForm:
    """A mixed step at the beginning of a packet, and what `worker.tables.positions.LayOut` returns for it."""

    form: MixedForm
    finish: Callable[[], StepTokens]


class Forms(Protocol):
    """The recordings of a device."""

    states: States
    chooses: bool
    """Whether recordings can choose tokens; else a later stage of the model does."""
    draws: bool
    """Whether recordings draw tokens at random."""
    buffer: Tensor
    """Where forms lie on the device, int32."""

    def find(self, rows: int, *, whole: bool) -> Form | None:
        """The smallest recorded form that has so many rows, if that is not far too large."""
        ...

    def stage_mixed(
        self, columns: Columns, token_types: Sequence[int] | None, sampling: Sequence[int], packet: Packet
    ) -> StagedForm | None:
        """Begin a packet with the form of any step, if one is recorded that is not far too large.

        `token_types`: those of all tokens, if some are not 0. `sampling`: the rows that sample, if recordings
        can choose all their tokens.
        """
        ...


def find_form(forms: Forms, seqs: Sequence[SeqStep], slots: Slots) -> Form | None:
    """The form in which a step without new sequences can be sent, if it computes one token of each."""
    if any(seq.count != 1 or not seq.samples or len(seq.blocks) > 1 for seq in seqs):
        return None
    whole = can_choose(forms, seqs, slots)
    form = forms.find(len(seqs), whole=whole)
    return form if form is not None and forms.states.knows(seqs) else None


def can_choose(forms: Forms, sampling: Sequence[SeqStep], slots: Slots) -> bool:
    """Whether a recording can choose the tokens of rows that sample: no logits are masked or reported."""
    if not forms.chooses:
        return False
    held = [seq.slot for seq in sampling]
    asks = slots.masked[held] | slots.penalised[held] | slots.logprobs[held]
    if not forms.draws:
        asks |= slots.temperature[held] > 0
    return not asks.any() and not any(seq.bound for seq in sampling)


def send_form(forms: Forms, form: Form, seqs: Sequence[SeqStep], slots: Slots, packet: Packet) -> None:
    """Begin a packet with a form: slots, and for each the next entry of its block table, -1 for none."""
    held = [seq.slot for seq in seqs]
    places = [slots.blocks[seq.slot] if seq.blocks else -1 for seq in seqs]
    blocks = [seq.blocks[0] if seq.blocks else 0 for seq in seqs]
    for seq in seqs:
        slots.blocks[seq.slot] += len(seq.blocks)
    fields = (held, slots.dummy), (places, -1), (blocks, 0)
    packet.begin_form(forms.buffer, [Column(values, fill, form.rows) for values, fill in fields])
    forms.states.advance(held)
