"""Lays a step's tokens out on CUDA, and sends the plan of its attention with what the step brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from worker.kernels.cuda.attention_plan import Launch, Plan, PlanKey, plan_step
from worker.kernels.cuda.capabilities import Card
from worker.tables.positions import Columns, StepTokens, lay_out
from worker.tables.slots import Slots
from worker.tables.staging import Packet


class PlannedLayout:
    """CUDA's `worker.tables.positions.LayOut`.

    Which kinds of heads a model has it learns from the first step, whose layers plan for themselves.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._last: Plan = {}
        """The plan of the step before, to which layers have added the kinds of heads that it lacked."""

    def __call__(self, columns: Columns, slots: Slots, packet: Packet) -> Callable[[], StepTokens]:
        finish = lay_out(columns, slots, packet)
        plan = self._plan(columns.counts, columns.ends, packet.ints)

        def finish_with_plan() -> StepTokens:
            ids, context = finish()
            self._last = plan
            for each in (context, *context.others):
                each.plan = plan
            return ids, context

        return finish_with_plan

    @property
    def kinds(self) -> list[PlanKey]:
        """The kinds of heads that steps have shown so far."""
        return list(self._last)

    def plan_for(self, counts: list[int], ends: list[int], target: torch.device) -> Plan:
        """A plan that stays on the device."""
        return self._plan(counts, ends, lambda numbers: torch.from_numpy(numbers).to(target))

    def _plan(self, counts: Sequence[int], ends: Sequence[int], send: Callable[[np.ndarray], Tensor]) -> Plan:
        return {
            key: [
                Launch.of(blocks, tiles, send) for blocks, tiles in plan_step(self._card, key, counts, ends)
            ]
            for key in self._last
        }
