"""The weights of a vocabulary, exp((logit - largest) / temperature), for rows that are drawn at random.

Two kinds with the same answers. `FewWeights` computes what is asked about, which is little where filters
leave few tokens; to know what that is, it reads results in the middle of a step. `AllWeights` computes
everything once and reads nothing. Weights are added in groups of 64, and groups in float64 by the caller:
exact enough for the widest vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from worker.sampling.groups import GROUP, Grouped


class Weights(Protocol):
    """N rows."""

    def largest(self, count: int) -> Tensor:
        """[N, K], falling; all of them if there are not so many."""
        ...

    def sums(self, floor: Tensor | None) -> Tensor:
        """[N, G] for each group, of the weights that are not under the floor [N, 1]."""
        ...

    def group(self, groups: Tensor) -> Tensor:
        """[N, 1] a group of each row -> [N, 64]."""
        ...


class AllWeights:
    def __init__(self, logits: Grouped, rows: Tensor, temperature: Tensor) -> None:
        """rows [N] of the logits; temperature [N, 1]."""
        one = logits.largest[rows].amax(-1, keepdim=True)  # [N, 1] the logit whose weight is 1
        self._weights = logits.logits[rows].sub_(one).div_(temperature).exp_()  # [N, V]
        self._groups = self._weights.unflatten(1, (-1, GROUP))  # [N, G, 64]

    def largest(self, count: int) -> Tensor:
        return self._weights.topk(min(count, self._weights.shape[1])).values

    def sums(self, floor: Tensor | None) -> Tensor:
        if floor is None:
            return self._groups.sum(-1)
        return torch.where(self._groups >= floor[:, None], self._groups, 0.0).sum(-1)

    def group(self, groups: Tensor) -> Tensor:
        return self._groups[torch.arange(len(groups), device=groups.device), groups.squeeze(1)]


class FewWeights:
    def __init__(self, logits: Grouped, rows: Tensor, temperature: Tensor) -> None:
        """As in `AllWeights`."""
        self._logits = logits
        self._rows = rows
        self._temperature = temperature
        largest = logits.largest[rows]  # [N, G]
        self._one = largest.amax(-1, keepdim=True)  # [N, 1]
        self._bounds = self._weigh(largest, self._one, temperature)  # [N, G] the largest weight of each group

    def largest(self, count: int) -> Tensor:
        groups = self._bounds.topk(min(count, self._bounds.shape[1])).indices  # [N, S]
        weights = self._look_into(_numbers(groups).expand_as(groups).flatten(), groups.flatten())
        weights = weights.view(len(groups), -1)  # [N, S * 64]
        return weights.topk(min(count, weights.shape[1])).values

    def sums(self, floor: Tensor | None) -> Tensor:
        if floor is None:
            return self._logits.sum_weights(self._rows, self._one, self._temperature)
        rows, groups = (self._bounds >= floor).nonzero(as_tuple=True)  # [M] each
        weights = self._look_into(rows, groups)  # [M, 64]
        sums = torch.where(weights >= floor[rows], weights, 0.0).sum(-1)  # [M]
        return torch.zeros_like(self._bounds).index_put_((rows, groups), sums)

    def group(self, groups: Tensor) -> Tensor:
        return self._look_into(_numbers(groups).squeeze(1), groups.squeeze(1))

    def some(self, chosen: Tensor) -> FewWeights:
        """Of these rows only."""
        return FewWeights(self._logits, self._rows[chosen], self._temperature[chosen])

    def all_of(self, chosen: Tensor) -> AllWeights:
        return AllWeights(self._logits, self._rows[chosen], self._temperature[chosen])

    def _look_into(self, rows: Tensor, groups: Tensor) -> Tensor:
        """[M] of our rows, and a group in each -> their weights [M, 64]."""
        logits = self._logits.look_into(self._rows[rows], groups)
        return self._weigh(logits, self._one[rows], self._temperature[rows])

    @staticmethod
    def _weigh(logits: Tensor, one: Tensor, temperature: Tensor) -> Tensor:
        return (logits - one).div_(temperature).exp_()


def _numbers(rows: Tensor) -> Tensor:
    """[N, ...] -> [N, 1] 0, 1, 2 ..."""
    return torch.arange(len(rows), device=rows.device)[:, None]
