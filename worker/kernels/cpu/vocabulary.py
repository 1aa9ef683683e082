"""What is asked about whole vocabularies, by `csrc/vocabulary.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels.cpu.library import LONG, POINTER, Library
from worker.sampling.groups import GROUP, Scan


def bind(library: Library) -> Scan:
    look = library.function("survey", POINTER, LONG, LONG, POINTER, POINTER)
    add = library.function("sum_weights", POINTER, POINTER, LONG, LONG, POINTER, POINTER, POINTER)

    def survey(logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, groups = len(logits), logits.shape[1] // GROUP
        told = torch.empty(2, rows, dtype=torch.int32)
        largest = torch.empty(rows, groups)
        look(logits.data_ptr(), rows, groups, told.data_ptr(), largest.data_ptr())
        return told, largest

    def sum_weights(logits: Tensor, rows: Tensor, one: Tensor, temperature: Tensor) -> Tensor:
        groups = logits.shape[1] // GROUP
        rows, one, temperature = rows.long(), one.contiguous(), temperature.contiguous()
        sums = torch.empty(len(rows), groups)
        add(
            *(logits.data_ptr(), rows.data_ptr(), len(rows), groups),
            *(one.data_ptr(), temperature.data_ptr(), sums.data_ptr()),
        )
        return sums

    return Scan(survey, sum_weights)
