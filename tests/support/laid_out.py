"""Steps that are planned and laid out at once, as tests look at them, in a small table of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from sizes import worker_config
from torch import Tensor

from models.context import ForwardContext
from worker.capacity import WorkerLimits
from worker.devices.cpu import Cpu
from worker.features.pooling.pooled_texts import EncodedTexts, PooledTexts, PoolPlan
from worker.protocol import NewSeq, Pooling, SeqStep, StepInput
from worker.sampling.logprobs import PromptLogprobPlan
from worker.sampling.sampler import SampleTargets
from worker.steps.batch import Batch, Staged
from worker.steps.feature import Hooks
from worker.steps.planner import StepPlanner
from worker.tables.positions import Columns, lay_out
from worker.tables.slots import Slots
from worker.tables.staging import Packet, Staging

BLOCKS = 10

NeededPositions = Callable[[Pooling, Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class Needed:
    """A pooler that reads the positions that a function names."""

    needed: NeededPositions

    def needed_positions(self, params: Pooling, tokens: Sequence[int]) -> Sequence[int]:
        return self.needed(params, tokens)

    def counted_rows(self, params: Pooling, tokens: Sequence[int]) -> None:
        """All of them count."""


@dataclass(frozen=True)
class LaidOut:
    ids: Tensor
    context: ForwardContext
    sampled: SampleTargets | None
    prompt_logprobs: Sequence[PromptLogprobPlan]
    pooled: PoolPlan | None

    @classmethod
    def of(cls, batch: Batch) -> LaidOut:
        ids, context = batch.lay_out()
        pooled = next((cast("Any", pool).args[0] for pool in batch.pools), None)
        return cls(ids, context, batch.sampled, batch.prompt_logprobs, pooled)


class Table:
    """A table of four slots of up to 20 tokens, in blocks of 4 if there are any, and steps that change it."""

    def __init__(
        self,
        needed_positions: NeededPositions | None = None,
        *,
        paged: bool = True,
        shares: Sequence[int] = (1,),
    ) -> None:
        self.device = Cpu(1)
        self.slots = Slots(self.device.target, 4, 20, block_size=4, paged=paged, shares=shares)
        self.staging = Staging(
            self.device.staging_buffer, steps_ahead=1, words=8
        )  # too few: packets must grow
        needed = needed_positions or (lambda _, tokens: range(len(tokens)))
        kind = PooledTexts if paged else EncodedTexts
        texts = cast("Any", Needed(needed)), (), worker_config(), 4, torch.float32, self.device.allocate
        self.pools = kind(*texts)
        self.pools.open(WorkerLimits(4, 4, 64, 20), self.slots, BLOCKS)
        self.planner = StepPlanner(self.slots, BLOCKS, 100, Hooks([self.pools]), self._begin)
        self.number = 0

    def step(self, *seqs: SeqStep, new: list[NewSeq] | None = None) -> LaidOut:
        self.number += 1
        step = StepInput(number=self.number, new=new or [], seqs=list(seqs))
        return LaidOut.of(self.planner.plan(self.planner.note(step), self.staging.open()))

    def _begin(self, asked: StepInput, step: StepInput, columns: Columns, packet: Packet) -> Staged:
        return Staged(lay_out(columns, self.slots, packet))
