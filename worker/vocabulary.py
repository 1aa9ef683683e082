"""Logits over a wide vocabulary, in groups of 64 with the largest of each: one quick pass for many slow ones.

The largest logit, the k largest and all above some floor lie in groups that the largest of each group shows.
Only these are looked into.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 64
"""Wide enough that groups are few, narrow enough that those looked into are small."""


class Grouped:
    def __init__(self, logits: Tensor) -> None:
        """[R, V] float32, from now on unchanged."""
        self.vocab_size = logits.shape[1]
        rest = -self.vocab_size % GROUP
        self.logits = functional.pad(logits, (0, rest), value=-torch.inf) if rest else logits.contiguous()
        self.largest = self.logits.unflatten(1, (-1, GROUP)).amax(-1)  # [R, G]

    def best(self) -> tuple[Tensor, Tensor]:
        """The largest logit of each row, and its token; [R] each. NaN counts as the largest."""
        values, groups = self.largest.max(-1)
        rows = torch.arange(len(groups), device=groups.device)
        return values, groups * GROUP + self.look_into(rows, groups).argmax(-1)

    def look_into(self, rows: Tensor, groups: Tensor) -> Tensor:
        """[M] rows, and a group in each -> [M, 64]."""
        return self.logits.view(-1, GROUP).index_select(0, rows * self.largest.shape[1] + groups)
