"""Bounds as a feature: a step that samples bound rows waits for its bounds when the model has computed."""

from __future__ import annotations

from torch import Tensor

from worker.protocol import StepBounds
from worker.sampling.token_bounds import Forbid, NextBounds, row_bits
from worker.steps.batch import Batch
from worker.steps.feature import Feature


class Bounds(Feature):
    def __init__(self, forbid: Forbid) -> None:
        """`forbid`: the device's way to forbid tokens in logits."""
        self._forbid = forbid
        self._early: StepBounds | None = None
        """The last bounds that came, if they are those of a later step."""

    def forbid(self, logits: Tensor, batch: Batch) -> None:
        if batch.sampled is None:
            return
        told = self.bounds_of(batch.step.number, batch.following)
        if (bits := row_bits(told, batch.sampled.bound, logits.shape[1])) is not None:
            self._forbid(logits, bits)

    def bounds_of(self, number: int, following: NextBounds) -> StepBounds:
        """The bounds of step `number`. Those of earlier steps, which broke before they asked, are dropped."""
        told, self._early = self._early or following(), None
        while told.number < number:
            told = following()
        if told.number > number:
            self._early = told
            raise ValueError(f"step {number} got no bounds: those of step {told.number} came")
        return told
