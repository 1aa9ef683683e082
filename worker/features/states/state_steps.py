"""States as a feature: layers of which a sequence keeps states, in a place for each slot and some remembered.

The first places belong to slots, the next one to nobody's slot, and those behind them to remembered states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from models.context import ForwardContext
from models.layers.state import StateLayer
from models.state_rows import NOWHERE, StateRow
from worker.capacity import CacheBudget, WorkerLimits
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.features.states.speculated_states import read_later
from worker.features.states.state_memory import StateMemory, StatePlan, plan_states
from worker.protocol import SeqStep, StepInput
from worker.ranks.pipeline_stage import Stage
from worker.steps.batch import Batch, Outcome
from worker.steps.feature import Feature, Taken
from worker.tables.positions import Columns, Read
from worker.tables.slots import Slots
from worker.tables.state_rows import StateReads
from worker.worker_facts import WorkerFacts


class States(Feature):
    _plan: StatePlan
    _slots: Slots
    memory: StateMemory | None = None
    """The states of this rank's layers, if it has some."""

    def __init__(
        self,
        layers: Sequence[StateLayer],
        config: WorkerConfig,
        device: Device,
        dtype: torch.dtype,
        stage: Stage | None,
        minimum: Callable[[int], int],
    ) -> None:
        """`layers`: none on a rank whose layers keep no states, while those of others do."""
        self._layers, self._config, self._device, self._stage = layers, config, device, stage
        self.keeps_guesses = keeps_guesses(config, device)
        self._guessed = dtype if self.keeps_guesses else None
        self._minimum = minimum

    def take(self, limits: WorkerLimits, budget: CacheBudget) -> Taken:
        self._plan = plan_states(
            self._layers, limits, self._config.options, budget, self._minimum, self._guessed
        )
        limits = replace(limits, max_num_seqs=self._plan.slots)
        return Taken(limits, self._plan.nbytes, "states")

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        self._slots, slots.rooms["states"] = slots, 1
        if self._layers:
            plan = self._plan
            places = slots.count + 1 + plan.remembered
            self.memory = StateMemory(
                self._layers, places, self._device.allocate, plan.guesses, self._guessed
            )
        if self._stage is not None and self.keeps_guesses:
            self._stage.tell_all()
        return ()

    def add_facts(self, facts: WorkerFacts) -> WorkerFacts:
        return msgspec.structs.replace(facts, remembered_states=self._plan.remembered)

    def read(self, columns: Columns, step: StepInput) -> Sequence[Read]:
        return (StateReads(state_rows(step.seqs, self._slots.count + 1)),)

    def follow(self, batch: Batch, ids: Tensor, step: ForwardContext, outcome: Outcome) -> Outcome:
        """Let states go on by guesses that hold; stages before the last one learn later which do."""
        if batch.asked is batch.step or not self._layers:
            return outcome
        ends_model = self._stage is None or self._stage.last
        landed = read_later(self._layers, batch, self._slots, copies=not ends_model)
        if not ends_model:
            return replace(outcome, landed=landed)
        landed()
        return outcome


def keeps_guesses(config: WorkerConfig, device: Device) -> bool:
    """Whether layers with states take guesses: on CPUs, where the host knows which hold.

    Stages before the last one learn that later, when a remembered state may be on its way to disk already.
    """
    place = config.place
    at_once = place.stages == 1 or config.options.kv_cache_dir is None
    return config.guesses and device.target.type == "cpu" and place.expert_replicas == 1 and at_once


def state_rows(seqs: Sequence[SeqStep], first_remembered: int) -> list[StateRow]:
    """The places of states of each row: those of slots, and remembered ones; guesses have rows of their own.

    A sequence with guesses writes the state behind the token before them, from which those that hold go on.
    """
    rows: list[StateRow] = []
    for seq in seqs:
        source = seq.slot if seq.source < 0 else first_remembered + seq.source
        kept = tuple((count, first_remembered + place) for count, place in seq.kept if count <= seq.count)
        if seq.guesses:
            rows.append(StateRow(source, NOWHERE, (*kept, (seq.count, seq.slot)), len(seq.guesses)))
            rows += [StateRow(NOWHERE, NOWHERE)] * len(seq.guesses)
        else:
            rows.append(StateRow(source, seq.slot, kept))
    return rows
