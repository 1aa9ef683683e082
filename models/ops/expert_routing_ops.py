"""The operations of a mixture of experts in plain torch: the specification of each faster kernel.

T tokens of a step, E experts, k experts of a token, F features. Choices are made in float32 whatever the
model's type is. A token's experts are added in the order of their numbers, in float32, so its result does
not depend on the other tokens of a step. No result has a shape that depends on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from models.ops.reference import activation, gated
from models.ops.tree_sum import add_in_pairs

MOST_EXPERTS = 4096
"""More than any published model has; what kernels keep for each expert and thread stays small."""


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """The rule by which a layer chooses experts for a token: facts that differ by family.

    Logits become scores, the best scores choose, and the scores of the chosen ones become their weights.
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
        if self.experts > MOST_EXPERTS:
            raise ValueError(f"{self.experts} experts are too many: {MOST_EXPERTS} are allowed")
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


WITHOUT_GATES = ("relu_squared",)
"""Activations of experts that have no gates: their first matrices are packed as for `linear`."""


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    routing: Routing,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts for x [T, F] -> their numbers [T, k] int32, ascending, and their weights [T, k] float32.

    `weight` [E, F] and `bias` [E] make logits of x. `correction` [E] float32 is added to scores for the
    choice. Of equal scores the one with the lower number is chosen. `factors` [E] float32: what weights of
    each expert are multiplied with in the end.
    """
    logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    ids, weights = choose(logits, correction, routing)
    return ids, weights if factors is None else weights * factors[ids.long()]


def choose(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """The second half of `route`, from logits [T, E] float32."""
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if routing.kept_groups < routing.groups:
        ranked = _within_groups(ranked, routing)
    ids = _best(ranked, routing.chosen).sort(dim=-1).values
    weights = scores.gather(-1, ids)
    if routing.normalised:
        total = weights.sum(-1, keepdim=True) + routing.epsilon
        weights = weights / total.clamp_min(routing.least_sum)
    return ids.int(), weights * routing.factor


def _within_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Let no expert be chosen that is not in one of the best groups."""
    by_group = ranked.unflatten(-1, (routing.groups, -1))  # [T, groups, E / groups]
    kept = _best(by_group.topk(routing.summed_best, dim=-1).values.sum(-1), routing.kept_groups)
    allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, kept, True)
    return by_group.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)


def _best(values: Tensor, count: int) -> Tensor:
    """The indices [T, count] of the largest values; `topk` promises no order among equal ones."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def collect_experts(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """Bring the matrices of all experts, as `pack` returned them, into what `experts` reads."""
    return tuple(matrices)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    kind: str,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    places: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """Send x [T, F] through the experts that `route` chose, and add the results up by weight -> [T, F].

    Matrices are packed as for `gated_linear` and `linear`, biases [E, 2I] and [E, F]. If the inputs of `down`
    are divided into sections, each is added up over the experts first, then sections are, as in `linear`:
    so ranks that hold some inputs of all experts compute a branch of the sum. `wide`: the result is float32.

    A rank that holds some experts whole says by `places` [E] int32 which matrices, and which biases, are
    those of each expert; -1 is one of another rank, which adds nothing and costs nothing.
    """
    if places is not None:
        ids = places[ids.long()]
    dtype = torch.promote_types(x.dtype, torch.float32)
    totals: list[Tensor] = []
    for number, (into, out_of) in enumerate(zip(gate_up, down, strict=True)):
        chosen = ids == number  # [T, k]
        share = weights.masked_fill(~chosen, 0).sum(-1, keepdim=True).to(dtype)
        inner = F.linear(x, into, None if gate_up_bias is None else gate_up_bias[number])
        inner = activation(inner, kind) if kind in WITHOUT_GATES else gated(inner, kind)
        results = _by_section(inner.to(dtype), out_of.to(dtype))
        if down_bias is not None:
            results[0] = results[0] + down_bias[number]
        # What an expert computes of others' tokens may be anything, infinite too.
        results = [(result * share).masked_fill(~chosen.any(-1, keepdim=True), 0) for result in results]
        totals = (
            [total + result for total, result in zip(totals, results, strict=True)] if totals else results
        )
    total = add_in_pairs(totals)
    return total if wide else total.to(x.dtype)


def _by_section(x: Tensor, weight: Tensor) -> list[Tensor]:
    """The products [T, out] of each section of the inputs."""
    if weight.dim() == 2:
        return [F.linear(x, weight)]
    pieces = x.chunk(len(weight), dim=1)
    return [F.linear(piece, matrix) for piece, matrix in zip(pieces, weight, strict=True)]


def add_gated(x: Tensor, rows: Tensor, gate: Tensor, total: Tensor) -> Tensor:
    """Add rows [T, F], each times the sigmoid of x [T, F] times gate [F], to `total` [T, F]."""
    factor = (x.float() * gate.float()).sum(-1, keepdim=True).sigmoid()
    return (total.float() + rows.float() * factor).to(x.dtype)
