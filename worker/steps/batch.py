"""A step on its way through the device: what is sent of it, what is computed, and what tells its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from models.pooling.task_heads import SparseWeights
from worker.protocol import SeqStep, StepInput, StepOutput, Task
from worker.sampling.logprobs import PromptLogprobPlan
from worker.sampling.sampler import SampledTokens, SampleTargets
from worker.sampling.token_bounds import NextBounds
from worker.tables.positions import Columns, StepTokens
from worker.tables.slots import Slots
from worker.tables.staging import Packet

Write = Callable[[], None]
"""The type of a function that writes what a packet brings into the tables, once that is on the device."""
Tell = Callable[[StepOutput], StepOutput]
"""The type of a function that completes the output of a step."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The tokens of a step in its packet, in the way that a device has chosen for it."""

    lay_out: Callable[[], StepTokens]
    """The function that lays the tokens out on the device, once the packet is sent and the tables written."""
    brings_blocks: bool = False
    """Whether new blocks are sent with the tokens already."""
    sampled: SampleTargets | None = None
    """The rows that sample, if the device chooses their tokens by itself."""
    words: Sequence[tuple[ArrayLike, ArrayLike]] = ()
    """Places in the memory of all tables, and words that are written there together with new tokens."""


NewTokens = tuple[int, int, Sequence[int]]
"""The type of tokens that a step brings: their slot, the position of the first, and the tokens."""


@dataclass(slots=True)  # not frozen: one is made for each step, and fields that are would take a call each
class NotedStep:
    """A step whose sequences the worker knows, before it is planned for the device."""

    asked: StepInput
    """The step as the engine has sent it."""
    step: StepInput
    """The step as it is computed: the same one unless features have given it more rows."""
    columns: Columns
    texts: Sequence[NewTokens]
    grown: Sequence[SeqStep]
    """The rows with new blocks."""
    tells: Sequence[Tell]

    def write_tables(self, tokens: np.ndarray, blocks: np.ndarray, slots: Slots) -> None:
        """Write new tokens and blocks into tables that the host can reach."""
        for slot, start, text in self.texts:
            tokens[slot, start : start + len(text)] = text
        for seq in self.grown:
            first = slots.blocks[seq.slot]
            slots.blocks[seq.slot] = stop = first + len(seq.blocks) // slots.groups
            blocks[:, seq.slot, first:stop] = slots.entries(seq)


Begin = Callable[[StepInput, StepInput, Columns, Packet], Staged]
"""The type of a function that begins the packet of a step, given as the engine sent it and as computed."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All that the device must be told of a step, on the way there."""

    step: StepInput
    """The step as it is computed, in which a sequence may have several rows."""
    asked: StepInput
    """The step as the engine has sent it: the same one unless features have given it more rows."""
    staged: Staged
    sampled: SampleTargets | None
    prompt_logprobs: Sequence[PromptLogprobPlan]
    following: NextBounds
    """The function that waits for what is told of the step later."""
    lay_out: Callable[[], StepTokens]
    """The function that writes the tables and lays the tokens out, on the device. It is called once."""
    pools: Sequence[Pool] = ()
    tells: Sequence[Tell] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    hidden: Tensor  # [T, H] what the last layer gives, or what the next stage gets
    tokens: SampledTokens | None
    prompt_tables: Sequence[Tensor]  # one for each of Batch.prompt_logprobs
    landed: Callable[[], None] | None = None
    """What is left to be done when the sampled tokens are in the table, in a stage before the last one."""


@dataclass(frozen=True, slots=True)
class PooledRow:
    """The sequence of some vectors, and what the host has to know of them."""

    row: int  # index in StepInput.seqs
    task: Task | None = None  # None: that of the sequence, else another of its outputs
    tokens: Sequence[int] | None = None  # of a sparse vector: the tokens whose weights these are
    sparse: SparseWeights | None = None  # of a sparse vector: which weights are kept


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """The results of pooling, on the device, and the sequences that failed before they had one."""

    rows: list[PooledRow] = field(default_factory=list[PooledRow])
    vectors: list[Tensor] = field(default_factory=list[Tensor])  # float32 [D] or [K, D] each
    failed: dict[int, str] = field(default_factory=dict[int, str])  # index -> why


Pool = Callable[[Batch, Outcome, PooledVectors], None]
"""The type of a function that adds the vectors of the sequences that a step completes."""


class Launched(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for the output of this step, but not for later steps."""
        ...


@dataclass(frozen=True, slots=True)
class LandedStep:
    """A step that was computed when it was launched."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output
