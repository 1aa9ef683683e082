"""Experts as a feature: ranks that share them compute steps together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace

from models.context import ForwardContext, context_without_rows, use_context
from models.layers.moe import MoeMLP
from models.model import ServedModel
from models.parallel.experts import count_chosen
from worker.capacity import WorkerLimits
from worker.config import WorkerConfig
from worker.protocol import StepInput
from worker.steps.feature import Feature
from worker.tables.positions import Columns, PlainRead, Read


class SharedExperts(Feature):
    def __init__(
        self,
        model: ServedModel,
        config: WorkerConfig,
        dtype: torch.dtype,
        target: torch.device,
    ) -> None:
        self._config, self._dtype, self._target = config, dtype, target
        self._mixtures = find_mixtures(model, config)

    def step_bytes(self, limits: WorkerLimits) -> int:
        """Tell the bytes of rows for experts whose results return apart, and of those results."""
        place, model = self._config.place, self._config.model
        if place.expert_transport != "all_to_all":
            return 0
        results = 3 * 4  # float32: as they are made, as they come back, and in the order of experts
        each = count_chosen(model) * model.hidden_size * (results + self._dtype.itemsize)
        return limits.max_num_batched_tokens * place.expert_replicas * each

    def warm_up(self, steps: list[StepInput]) -> list[StepInput]:
        """Tell that all replicas take the same steps."""
        replicas = self._config.place.expert_replicas
        if replicas == 1:
            return steps
        return [replace(step, replica_tokens=[step.seqs[0].count] * replicas) for step in steps]

    def before(self, step: StepInput) -> None:
        """Compute what this rank's experts make of the tokens of others if it has none itself."""
        if not step.seqs:
            with use_context(context_without_rows(step.replica_tokens, self._target)):
                for mixture in self._mixtures:
                    mixture.take_part(self._dtype, self._target)

    def read(self, columns: Columns, step: StepInput) -> Sequence[Read]:
        if not step.replica_tokens:
            return ()

        def show(context: ForwardContext) -> None:
            context.replica_tokens = step.replica_tokens

        return (PlainRead(lambda packet: show),)


def find_mixtures(model: ServedModel, config: WorkerConfig) -> list[MoeMLP]:
    """The layers whose experts may be shared among workers."""
    found = [each for each in model.modules() if isinstance(each, MoeMLP)]
    if config.place.expert_size > 1 and config.place.stages == 1 and not found:
        raise ValueError(
            f"--enable-expert-parallel: the experts of {config.model.architecture} cannot be divided among "
            "workers here; leave it out"
        )
    return found
