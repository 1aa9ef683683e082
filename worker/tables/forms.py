"""The forms in which steps of single tokens are sent to a device that has recorded such steps.

A form has rows of a few sizes. What a smaller step leaves over belongs to the slot that is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.protocol import SeqStep
from worker.tables.slots import Slots
from worker.tables.staging import Packet
from worker.tables.states import States


@dataclass(frozen=True, slots=True)
class Form:
    rows: int
    whole: bool
    """Whether tokens are chosen in the recording, too, which else ends with the logits."""


class Forms(Protocol):
    """The recordings of a device."""

    states: States
    draws: bool
    """Whether recordings draw tokens at random."""
    buffer: Tensor
    """Where forms lie on the device, int32."""

    def find(self, rows: int, *, whole: bool) -> Form | None:
        """The smallest recorded form that has so many rows, if that is not far too large."""
        ...


def find_form(forms: Forms, seqs: Sequence[SeqStep], slots: Slots) -> Form | None:
    """The form in which a step without new sequences can be sent, if it computes one token of each."""
    if any(seq.count != 1 or not seq.samples or len(seq.blocks) > 1 for seq in seqs):
        return None
    held = [seq.slot for seq in seqs]
    asks = slots.masked[held] | slots.penalised[held] | slots.logprobs[held]
    if not forms.draws:
        asks |= slots.temperature[held] > 0
    whole = not asks.any() and not any(seq.bound for seq in seqs)
    form = forms.find(len(seqs), whole=whole)
    return form if form is not None and forms.states.knows(seqs) else None


def send_form(forms: Forms, form: Form, seqs: Sequence[SeqStep], slots: Slots, packet: Packet) -> None:
    """Begin a packet with a form: slots, and for each the next entry of its block table, -1 for none."""
    held = [seq.slot for seq in seqs]
    places = [slots.blocks[seq.slot] if seq.blocks else -1 for seq in seqs]
    blocks = [seq.blocks[0] if seq.blocks else 0 for seq in seqs]
    for seq in seqs:
        slots.blocks[seq.slot] += len(seq.blocks)
    packet.begin_form(forms.buffer, form.rows, [(held, slots.dummy), (places, -1), (blocks, 0)])
    forms.states.advance(held)
