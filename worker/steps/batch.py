"""A step on its way through the device: what is sent of it, what is computed, and what tells its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from models.pooling.pooler import SparseWeights
from worker.protocol import StepInput, StepOutput, Task
from worker.sampling.logprobs import PromptLogprobPlan
from worker.sampling.sampler import SampledTokens, SampleTargets
from worker.tables.positions import StepTokens
from worker.tables.recorded_forms import Form, MixedForm


@dataclass(frozen=True, slots=True)
class Batch:
    """All that the device must be told of a step, on the way there."""

    step: StepInput
    """The step as it is computed, in which a sequence may have several rows."""
    asked: StepInput
    """The step as the engine has sent it: the same one unless features have given it more rows."""
    lay_out: Callable[[], StepTokens]
    """The function that writes the tables and lays the tokens out, on the device. It is called once."""
    sampled: SampleTargets | None
    prompt_logprobs: list[PromptLogprobPlan]
    form: Form | MixedForm | None = None
    """The recorded form in which the step is sent. It is laid out, then, by the recording."""


@dataclass(frozen=True, slots=True)
class Outcome:
    hidden: Tensor  # [T, H] the last hidden states, or what the next stage gets
    tokens: SampledTokens | None
    prompt_tables: list[Tensor]  # one for each of Batch.prompt_logprobs
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


class Launched(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for the output of this step, but not for later steps."""
        ...
