"""Bounds as a feature: a step that samples bound rows waits for its bounds when the model has computed."""

from __future__ import annotations

from torch import Tensor

from worker.protocol import StepInput
from worker.sampling.token_bounds import BoundsReader, Forbid, NextBounds, nothing_follows, row_bits
from worker.steps.batch import Batch
from worker.steps.feature import Feature


class Bounds(Feature):
    def __init__(self, forbid: Forbid) -> None:
        """`forbid`: the device's way to forbid tokens in logits."""
        self._forbid, self._reader = forbid, BoundsReader()
        self._following: NextBounds = nothing_follows

    def before(self, step: StepInput, following: NextBounds) -> None:
        self._following = following

    def forbid(self, logits: Tensor, batch: Batch) -> None:
        if batch.sampled is None:
            return
        told = self._reader.read(batch.step.number, self._following)
        if (bits := row_bits(told, batch.sampled.bound, logits.shape[1])) is not None:
            self._forbid(logits, bits)
