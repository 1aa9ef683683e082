"""Logits over a wide vocabulary, in groups of 64 with the largest of each, and in slices of rows.

One quick pass finds the largest and saves many slow ones: the largest logit, the k largest and all above some
floor lie in groups that the largest of each group shows, and only these groups are read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

GROUP = 64
"""The tokens in a group: enough that groups are few, few enough that reading one again is quick."""

WORKSPACE = 64 << 20
"""The most bytes of a tensor [slice of rows, vocabulary], where work can be cut into slices of rows."""
CACHED = 1 << 20
"""The bytes of a slice of rows, which stay in the caches of most processors."""


def slice_rows(vocab_size: int) -> int:
    """The number of rows of float32 logits that fill the workspace."""
    return max(1, WORKSPACE // (4 * vocab_size))


def in_slices(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Numbers of rows, some at a time."""
    return [rows[first : first + size] for first in range(0, len(rows), size)]


@dataclass(frozen=True, slots=True)
class Scan:
    """The functions by which a device reads its logits [R, G * 64] and computes masses, all float32.

    A mass has the same bits whichever of them computes it, and so has the sum of a group, because the options
    of other rows decide which of them is called.
    """

    find_largest: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Logits -> [2, R] int32: the likeliest token, and 0 where the logits give no answer; [R, G] the largest
    logit of each group."""
    sum_mass: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """Logits, rows [N], their largest logits and temperatures [N, 1] each -> [N, G] the mass of each group,
    the sum of exp((logit - largest) / temperature)."""
    find_mass: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Logits [M, W], which may be overwritten, their rows' largest logits and temperatures [M, 1] each
    -> [M, W] masses."""
    sum_above: Callable[[Tensor, Tensor], Tensor]
    """Masses [M, 64] and a floor of each row [M, 1] -> [M] the sums of the masses that are not under it."""


class GroupedLogits:
    def __init__(self, logits: Tensor, scan: Scan) -> None:
        """`logits` [R, V] float32 must not change from now on."""
        self.vocab_size = logits.shape[1]
        rest = -self.vocab_size % GROUP
        self.logits = functional.pad(logits, (0, rest), value=-torch.inf) if rest else logits.contiguous()
        self.best, self.largest = scan.find_largest(self.logits)
        self.scan = scan

    def gather(self, rows: Tensor, groups: Tensor) -> Tensor:
        """The logits [M, 64] of one group [M] of each of these rows [M]."""
        return self.logits.view(-1, GROUP).index_select(0, rows * self.largest.shape[1] + groups)


def _find_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    grouped = logits.unflatten(1, (-1, GROUP))  # [R, G, 64]
    largest = grouped.amax(-1)
    values, groups = largest.max(-1)  # NaN and infinity win a maximum, and nothing but -inf has none
    rows = torch.arange(len(groups), device=groups.device)
    tokens = groups * GROUP + grouped[rows, groups].argmax(-1)
    return torch.stack([tokens.int(), values.isfinite().int()]), largest


def _sum_mass(logits: Tensor, rows: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    most = max(1, CACHED // (4 * logits.shape[1]))
    slices = zip(rows.split(most), peak.split(most), temperature.split(most), strict=True)
    return torch.cat(
        [
            _find_mass(logits[some], peaks, degrees).unflatten(1, (-1, GROUP)).sum(-1)
            for some, peaks, degrees in slices
        ]
    )


def _find_mass(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    return logits.sub_(peak).div_(temperature).exp_()


def _sum_above(masses: Tensor, floor: Tensor) -> Tensor:
    return torch.where(masses >= floor, masses, 0.0).sum(-1)


BY_TORCH = Scan(_find_largest, _sum_mass, _find_mass, _sum_above)
"""The functions in plain torch, which run on any device."""
