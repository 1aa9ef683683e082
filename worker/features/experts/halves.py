"""Halves of steps as a feature of replicas that share experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.context import ForwardContext
from worker.protocol import StepInput
from worker.ranks.half_steps import HalfStepGroup, cut_step
from worker.sampling.token_bounds import NextBounds
from worker.steps.feature import Feature, Run


class Halves(Feature):
    """Computes steps in two halves, so that exchanges with other replicas are hidden behind computing."""

    def __init__(self, group: HalfStepGroup) -> None:
        """`group`: this rank and those with which it may compute halves of steps."""
        self._group = group
        self._first_halves: Sequence[int] = ()
        """The tokens of each replica's first half in the step; nothing if it is computed whole."""

    def before(self, step: StepInput, following: NextBounds) -> None:
        self._first_halves = step.first_halves

    def around(self, run: Run) -> Run:
        """Return a forward pass that computes steps with first halves in turns, by `run`."""

        def run_halves(ids: Tensor, step: ForwardContext, stream: Tensor | None) -> Tensor:
            if not self._first_halves:
                return run(ids, step, stream)

            def compute(part: ForwardContext, own: slice) -> Tensor:
                if ids.is_cuda:
                    torch.cuda.set_device(ids.device)  # a thread of its own begins with the first one
                with torch.inference_mode():
                    return run(ids[own], part, None if stream is None else stream[own])

            first, second = cut_step(step, self._first_halves, self._group.rank)
            tokens = len(first.positions)
            halves = self._group.compute_both(
                lambda: compute(first, slice(tokens)), lambda: compute(second, slice(tokens, None))
            )
            return torch.cat(halves)

        return run_halves
