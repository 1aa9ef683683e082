"""Lays a step's tokens out on CUDA, and sends the plan of its attention with what the step brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from worker.kernels.cuda.attention_plan import Launch, Plan, PlanKey, plan_room, plan_step
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

    def room_for(self, rows: int, longest: int, target: torch.device) -> Plan:
        """Room for the plan of so many single tokens, which a kernel makes on the device."""
        plan: Plan = {}
        for key in self._last:
            room, tiles = plan_room(self._card, key, rows, rows, longest)[0]
            entries = torch.zeros(room.size, dtype=torch.int32, device=target)
            plan[key] = [Launch(entries, entries.clone(), tiles, room.kind, room.split)]
        return plan

    def _plan(self, counts: Sequence[int], ends: Sequence[int], send: Callable[[np.ndarray], Tensor]) -> Plan:
        return {
            key: [
                Launch.of(blocks, tiles, send) for blocks, tiles in plan_step(self._card, key, counts, ends)
            ]
            for key in self._last
        }
