"""The mass of tokens, exp((logit - peak) / temperature), for rows that are drawn at random.

The peak is the row's largest logit, so the likeliest token has mass 1, and a mass is a probability but for a
factor. There are two implementations with the same results. `LazyMass` computes only the groups that are
asked for, which are few where filters leave few tokens; to know which, it reads results in the middle of a
step. `FullMass` computes everything once and reads nothing. Masses are added in groups of 64, and groups in
float64 by the caller: exact enough for the widest vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from worker.sampling.groups import GROUP, GroupedLogits


class Mass(Protocol):
    """The masses of N rows [N, V]."""

    def largest(self, count: int) -> Tensor:
        """The `count` largest masses of each row [N, K], falling; all of them if there are not so many."""
        ...

    def sums(self, floor: Tensor | None) -> Tensor:
        """The sum of each group [N, G], without masses under the floor [N, 1]."""
        ...

    def group(self, groups: Tensor) -> Tensor:
        """The masses [N, 64] of one group [N, 1] of each row."""
        ...


class FullMass:
    def __init__(self, logits: GroupedLogits, rows: Tensor, temperature: Tensor) -> None:
        """`rows` [N] of the logits, `temperature` [N, 1] of each."""
        peak = logits.largest[rows].amax(-1, keepdim=True)  # [N, 1]
        self._mass = logits.scan.find_mass(logits.logits[rows], peak, temperature)  # [N, V]
        self._groups = self._mass.unflatten(1, (-1, GROUP))  # [N, G, 64]

    def largest(self, count: int) -> Tensor:
        return self._mass.topk(min(count, self._mass.shape[1])).values

    def sums(self, floor: Tensor | None) -> Tensor:
        if floor is None:
            return self._groups.sum(-1)
        return torch.where(self._groups >= floor[:, None], self._groups, 0.0).sum(-1)

    def group(self, groups: Tensor) -> Tensor:
        return self._groups[torch.arange(len(groups), device=groups.device), groups.squeeze(1)]


class LazyMass:
    def __init__(self, logits: GroupedLogits, rows: Tensor, temperature: Tensor) -> None:
        """`rows` [N] of the logits, `temperature` [N, 1] of each."""
        self._logits = logits
        self._rows = rows
        self._temperature = temperature
        largest = logits.largest[rows]  # [N, G]
        self._peak = largest.amax(-1, keepdim=True)  # [N, 1]
        self._bounds = logits.scan.find_mass(
            largest, self._peak, temperature
        )  # [N, G] each group's largest mass

    def largest(self, count: int) -> Tensor:
        groups = self._bounds.topk(min(count, self._bounds.shape[1])).indices  # [N, S]
        masses = self._of_groups(_numbers(groups).expand_as(groups).flatten(), groups.flatten())
        masses = masses.view(len(groups), -1)  # [N, S * 64]
        return masses.topk(min(count, masses.shape[1])).values

    def sums(self, floor: Tensor | None) -> Tensor:
        if floor is None:
            return self._logits.sum_mass(self._rows, self._peak, self._temperature)
        rows, groups = (self._bounds >= floor).nonzero(as_tuple=True)  # [M] each
        masses = self._of_groups(rows, groups)  # [M, 64]
        sums = self._logits.scan.sum_above(masses, floor[rows])  # [M]
        return torch.zeros_like(self._bounds).index_put_((rows, groups), sums)

    def group(self, groups: Tensor) -> Tensor:
        return self._of_groups(_numbers(groups).squeeze(1), groups.squeeze(1))

    def select(self, chosen: Tensor) -> LazyMass:
        """The masses of some of these rows."""
        return LazyMass(self._logits, self._rows[chosen], self._temperature[chosen])

    def full(self, chosen: Tensor) -> FullMass:
        """The masses of some of these rows, all computed."""
        return FullMass(self._logits, self._rows[chosen], self._temperature[chosen])

    def _of_groups(self, rows: Tensor, groups: Tensor) -> Tensor:
        """The masses [M, 64] of one group [M] of each of these rows [M]."""
        logits = self._logits.gather(self._rows[rows], groups)
        return self._logits.scan.find_mass(logits, self._peak[rows], self._temperature[rows])


def _numbers(rows: Tensor) -> Tensor:
    """The numbers of these rows [N, 1]: 0, 1, 2 ..."""
    return torch.arange(len(rows), device=rows.device)[:, None]
