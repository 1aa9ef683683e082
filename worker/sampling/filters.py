"""Filters that are no floor under the masses of a draw: top_n_sigma and typical_p.

They refuse tokens before the draw, by logits of -inf. Tokens that tie with the last one pass. Each row is
computed alone, so that its bits do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.tables.slots import SampleRows, Slots


@dataclass(frozen=True, slots=True)
class Filter:
    """The filters of one row."""

    row: int
    sigmas: float
    """Tokens may lie so many standard deviations of all logits below the likeliest; 0 is off."""
    typical_p: float
    """The mass of the tokens that are kept, of those whose surprise is nearest to the mean; 1 is off."""

    def apply(self, logits: Tensor) -> None:
        """Refuses tokens of the row in the logits [R, V], in place."""
        own = logits[self.row]  # [V]
        if self.sigmas:
            allowed = own > -torch.inf
            count = allowed.sum()
            mean = torch.where(allowed, own, 0.0).sum(dtype=torch.float64) / count
            squares = torch.where(allowed, own.double() - mean, 0.0).square()
            floor = own.max() - self.sigmas * (squares.sum() / count).sqrt()
            own.masked_fill_(own < floor, -torch.inf)
        if self.typical_p < 1:
            surprise = -own.double().log_softmax(0)  # [V]
            mass = (-surprise).exp()
            mean = torch.where(mass > 0, mass * surprise, 0.0).sum()
            distance = (surprise - mean).abs()
            rising, order = distance.sort()
            before = mass[order].cumsum(0) - mass[order]
            last = torch.where(before <= self.typical_p, rising, 0.0).max()
            own.masked_fill_(distance > last, -torch.inf)


def plan_filters(slots: Slots, rows: SampleRows) -> list[Filter]:
    chosen = np.flatnonzero(slots.filtered[rows.slots]).tolist()
    params = [slots.params[rows.slots[row]] for row in chosen]
    return [Filter(row, each.top_n_sigma, each.typical_p) for row, each in zip(chosen, params, strict=True)]
