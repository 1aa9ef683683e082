"""Logits over a wide vocabulary, in groups of 64 with the largest of each: one quick pass for many slow ones.

The largest logit, the k largest and all above some floor lie in groups that the largest of each group shows.
Only these are looked into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 64
"""Wide enough that groups are few, narrow enough that those looked into are small."""

CACHED = 1 << 20
"""Bytes: rows are treated in slices of this size, which stay in the caches of most processors."""


@dataclass(frozen=True, slots=True)
class Scan:
    """How a device looks through all of its logits [R, G * 64], float32."""

    survey: Callable[[Tensor], tuple[Tensor, Tensor]]
    """-> [2, R] int32: the likeliest token, and 0 where the logits give no answer; [R, G] the largest of each
    group."""
    sum_weights: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """rows [N], the logit whose weight is 1 and the temperature [N, 1] each -> [N, G] the sums of groups of
    weights exp((logit - one) / temperature)."""


class Grouped:
    def __init__(self, logits: Tensor, scan: Scan) -> None:
        """[R, V] float32, from now on unchanged."""
        self.vocab_size = logits.shape[1]
        rest = -self.vocab_size % GROUP
        self.logits = functional.pad(logits, (0, rest), value=-torch.inf) if rest else logits.contiguous()
        self.told, self.largest = scan.survey(self.logits)
        self._scan = scan

    def look_into(self, rows: Tensor, groups: Tensor) -> Tensor:
        """[M] rows, and a group in each -> [M, 64]."""
        return self.logits.view(-1, GROUP).index_select(0, rows * self.largest.shape[1] + groups)

    def sum_weights(self, rows: Tensor, one: Tensor, temperature: Tensor) -> Tensor:
        """As in `Scan`."""
        return self._scan.sum_weights(self.logits, rows, one, temperature)


def _survey(logits: Tensor) -> tuple[Tensor, Tensor]:
    grouped = logits.unflatten(1, (-1, GROUP))  # [R, G, 64]
    largest = grouped.amax(-1)
    values, groups = largest.max(-1)  # NaN and infinity win a maximum, and nothing but -inf has none
    rows = torch.arange(len(groups), device=groups.device)
    tokens = groups * GROUP + grouped[rows, groups].argmax(-1)
    return torch.stack([tokens.int(), values.isfinite().int()]), largest


def _sum_weights(logits: Tensor, rows: Tensor, one: Tensor, temperature: Tensor) -> Tensor:
    most = max(1, CACHED // (4 * logits.shape[1]))
    slices = zip(rows.split(most), one.split(most), temperature.split(most), strict=True)
    return torch.cat(
        [
            (logits[some] - of_one).div_(degree).exp_().unflatten(1, (-1, GROUP)).sum(-1)
            for some, of_one, degree in slices
        ]
    )


BY_TORCH = Scan(_survey, _sum_weights)
"""On any device."""
