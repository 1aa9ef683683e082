"""The rule by which a layer chooses experts for a token: facts that differ by family, and nothing else."""

from __future__ import annotations

from typing import Literal

import msgspec


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Logits become scores, the best scores choose, and the scores of the chosen ones become their weights.

    A correction, where a family has one, is added to scores for the choice alone.
    """

    experts: int
    chosen: int
    """The number of experts of a token."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """Whether the weights of a token are divided by their sum."""
    epsilon: float = 0.0
    """A number that is added to that sum."""
    least_sum: float = 0.0
    """The least number that weights are divided by."""
    factor: float = 1.0
    """A factor of all weights."""
    groups: int = 1
    """The groups of neighbouring experts, of which each token takes some only."""
    kept_groups: int = 1
    """The groups that a token may choose from: those with the largest sums of their best scores."""
    summed_best: int = 2
    """The number of a group's best scores that are summed for that: 2, or 1, which is the largest alone."""

    def __post_init__(self) -> None:
        size, rest = divmod(self.experts, self.groups)
        if rest or not 1 <= self.kept_groups <= self.groups or (self.groups > 1 and size < self.summed_best):
            raise ValueError(
                f"{self.experts} experts cannot be chosen from {self.kept_groups} of {self.groups} groups"
            )
        if not 1 <= self.chosen <= self.kept_groups * size:
            raise ValueError(
                f"{self.chosen} experts cannot be chosen of {self.kept_groups * size}: config.json must say "
                "fewer"
            )
