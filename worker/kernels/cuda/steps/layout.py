"""Lays a step's tokens out on CUDA, and sends the plan of its attention with what the step brings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.kernels.cuda.attention import Launch, PlanKey, plan_step
from worker.kernels.cuda.card import Card
from worker.tables.positions import Columns, StepTokens, lay_out
from worker.tables.slots import Slots
from worker.tables.staging import Packet

Plan = dict[PlanKey, list[Launch]]


class Layout:
    """CUDA's `worker.tables.positions.LayOut`.

    Which kinds of heads a model has it learns from the first step, whose layers plan for themselves.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._known: Plan = {}
        """The plan of the step before, whose keys are the kinds of heads."""

    def __call__(self, columns: Columns, slots: Slots, packet: Packet) -> Callable[[], StepTokens]:
        finish = lay_out(columns, slots, packet)
        plan: Plan = {
            key: [
                Launch.of(blocks, tiles, packet.ints)
                for blocks, tiles in plan_step(self._card, key, columns.counts, columns.ends, slots.max_len)
            ]
            for key in self._known
        }

        def finish_with_plan() -> StepTokens:
            ids, context = finish()
            self._known = context.plan = plan
            return ids, context

        return finish_with_plan

    @property
    def kinds(self) -> list[PlanKey]:
        """The kinds of heads that steps have shown so far."""
        return list(self._known)

    def plan_for(self, counts: list[int], ends: list[int], target: torch.device) -> Plan:
        """A plan that stays on the device, for the kinds of heads that steps have shown so far."""
        return {
            key: [
                Launch.of(blocks, tiles, lambda numbers: torch.from_numpy(numbers).to(target))
                for blocks, tiles in plan_step(self._card, key, counts, ends, max(ends))
            ]
            for key in self._known
        }
