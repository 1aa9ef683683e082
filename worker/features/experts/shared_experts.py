"""Experts as a feature: ranks that share them compute steps together, and move experts by load."""

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
from worker.features.experts.balancer import Balancer
from worker.protocol import StepInput
from worker.ranks.process_groups import Groups, expert_place
from worker.steps.batch import Batch, Tell
from worker.steps.feature import Feature
from worker.tables.positions import Columns, PlainRead, Read


class SharedExperts(Feature):
    _balancer: Balancer | None = None
    """What moves experts by load, once the first steps are done."""

    def __init__(
        self,
        model: ServedModel,
        config: WorkerConfig,
        groups: Groups,
        dtype: torch.dtype,
        target: torch.device,
    ) -> None:
        self._model, self._config, self._groups = model, config, groups
        self._dtype, self._target = dtype, target
        self._mixtures = find_mixtures(model, config)

    def step_bytes(self, limits: WorkerLimits) -> int:
        """Tell the bytes of rows for experts whose results return apart, and of those results."""
        place, model = self._config.place, self._config.model
        if place.expert_transport != "all_to_all":
            return 0
        results = 3 * 4  # float32: as they are made, as they come back, and in the order of experts
        each = count_chosen(model) * model.hidden_size * (results + self._dtype.itemsize)
        return limits.max_num_batched_tokens * place.expert_replicas * each

    def begin(self) -> None:
        """Count the load of experts from now on, if they are moved by it."""
        balancing, place = self._config.balancing, expert_place(self._config)
        if balancing is None or place is None or self._groups.experts is None or not self._mixtures:
            return
        size = self._config.place.tensor_size
        self._balancer = Balancer(self._model, place, self._groups.experts, size, balancing)

    def warm_up(self, steps: list[StepInput]) -> list[StepInput]:
        """Tell that all replicas take the same steps."""
        replicas = self._config.place.expert_replicas
        if replicas == 1:
            return steps
        return [replace(step, replica_tokens=[step.seqs[0].count] * replicas) for step in steps]

    def before(self, step: StepInput) -> None:
        """Move experts, and compute what this rank's make of the tokens of others if it has none itself."""
        if self._balancer is not None:
            self._balancer.before_step()
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

    def tell(self, batch: Batch) -> Sequence[Tell]:
        if self._balancer is None or not self._config.place.returns_outputs:
            return ()
        report = self._balancer.take_report()
        return [lambda output: replace(output, experts=report)] if report else ()


def find_mixtures(model: ServedModel, config: WorkerConfig) -> list[MoeMLP]:
    """The layers whose experts may be shared among workers."""
    found = [each for each in model.modules() if isinstance(each, MoeMLP)]
    if config.place.expert_size > 1 and config.place.stages == 1 and not found:
        raise ValueError(
            f"--enable-expert-parallel: the experts of {config.model.architecture} cannot be divided among "
            "workers here; leave it out"
        )
    return found
