"""Drafters: models that guess what the served one will sample next.

A drafter follows every step, and keeps entries of its own in the same cache blocks. So chunks of prompts,
shared prefixes and preemption are as right for it as for the served model. Its guesses go up with the output
of a step and come down again with a later one: the worker keeps none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace
from torch import Tensor

from models.context import ForwardContext
from models.layers.attention import CachedAttention
from models.model import Forward
from worker.protocol import StepInput, StepOutput
from worker.sampling.grouped_logits import Scan
from worker.sampling.top_k_top_p import Draw
from worker.steps.batch import Batch
from worker.steps.output import StepHandle
from worker.tables.positions import LayOut
from worker.tables.slots import Slots
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


class Drafter(Protocol):
    """The type of what makes guesses."""

    @property
    def block_bytes(self) -> int:
        """The bytes that it keeps for each cache block beside the entries of its attention layers."""
        ...

    @property
    def parts(self) -> Sequence[Tensor]:
        """The memory of these, parts [blocks, ...], once it has begun."""
        ...

    def attention_layers(self) -> Sequence[CachedAttention]:
        """Its attention layers, whose entries lie in the cache beside those of the served model."""
        ...

    def parameters(self) -> Iterator[Tensor]:
        """All tensors that were loaded for it alone."""
        ...

    def begin(self, slots: Slots, packet: Packet, scan: Scan, draw: Draw) -> None:
        """Take the tables of slots, a packet of its own, and the device's ways to choose tokens."""
        ...

    def make_stream(self, tokens: int) -> Tensor | None:
        """The place of what a forward pass of so many tokens reads beside their ids; None: nothing."""
        ...

    def quicken(self, lay_out: LayOut, record: Callable[[Forward], Forward] | None) -> None:
        """Use the device's layout of steps, and let forward passes of small steps be replayed if they can."""
        ...

    def extend(self, batch: Batch, ids: Tensor, context: ForwardContext, hidden: Tensor) -> None:
        """Write its entries for the tokens of a step, `ids` [T], with last hidden states `hidden` [T, H].

        The tokens that the step has sampled are in the table of tokens already.
        """
        ...

    def propose(self, newest: Sequence[Newest]) -> dict[int, list[int]]:
        """Guess what follows these tokens -> slot -> the guesses. Called after `extend`, for the same step.

        The newest token of each is in the table, and its position has no entry yet.
        """
        ...


@dataclass(frozen=True, slots=True)
class Proposed:
    """The output of a step, with guesses for the next one."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


def add_drafts(drafter: Drafter, step: StepInput, handle: StepHandle) -> StepHandle | Proposed:
    """Let the drafter guess behind the sequences of a step for which it is asked."""
    if not [seq for seq in step.seqs if seq.proposes]:
        return handle
    output = handle.result()
    began = time.perf_counter()
    newest: list[Newest] = []
    first = 0
    for seq, token in zip(step.seqs, output.tokens, strict=True):
        if seq.proposes and token >= 0:
            held = len(output.held.get(seq.slot, ()))
            position, row = seq.start + seq.count + held, first + seq.count - 1 + held
            newest.append(Newest(seq.slot, position, row, seq.output_index + held + 1, seq.proposes))
        first += seq.tokens
    drafts = drafter.propose(newest) if newest else {}
    return Proposed(replace(output, drafts=drafts, proposing=time.perf_counter() - began))
