"""A step that is planned and laid out at once, as tests look at it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.context import ForwardContext
from worker.pooling import PoolPlan
from worker.sampling.logprobs import PromptLogprobPlan
from worker.sampling.sampler import SampleTargets
from worker.steps.batch import Batch


@dataclass(frozen=True)
class LaidOut:
    ids: Tensor
    context: ForwardContext
    sampled: SampleTargets | None
    prompt_logprobs: list[PromptLogprobPlan]
    pooled: PoolPlan | None

    @classmethod
    def of(cls, batch: Batch) -> LaidOut:
        ids, context = batch.lay_out()
        return cls(ids, context, batch.sampled, batch.prompt_logprobs, batch.pooled)
