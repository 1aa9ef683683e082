"""Passes over the logits of whole vocabularies, by `csrc/vocabulary.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels.cpu.library import LONG, POINTER, Library
from worker.sampling.groups import GROUP, Scan


def bind(library: Library) -> Scan:
    """The two passes as the sampler calls them."""
    find = library.function("find_largest", POINTER, LONG, LONG, POINTER, POINTER)
    add = library.function("sum_mass", POINTER, POINTER, LONG, LONG, POINTER, POINTER, POINTER)

    def find_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, groups = len(logits), logits.shape[1] // GROUP
        best = torch.empty(2, rows, dtype=torch.int32)
        largest = torch.empty(rows, groups)
        find(logits.data_ptr(), rows, groups, best.data_ptr(), largest.data_ptr())
        return best, largest

    def sum_mass(logits: Tensor, rows: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
        groups = logits.shape[1] // GROUP
        rows, peak, temperature = rows.long(), peak.contiguous(), temperature.contiguous()
        sums = torch.empty(len(rows), groups)
        add(
            *(logits.data_ptr(), rows.data_ptr(), len(rows), groups),
            *(peak.data_ptr(), temperature.data_ptr(), sums.data_ptr()),
        )
        return sums

    return Scan(find_largest, sum_mass)
