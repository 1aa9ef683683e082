"""Passes over the logits of whole vocabularies, by `csrc/vocabulary.c` and `csrc/forbid.c`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.kernels.cpu.library import Library
from worker.sampling.grouped_logits import GROUP, Scan
from worker.sampling.token_bounds import WORD, Forbid, RowBits


def bind(library: Library) -> Scan:
    """The passes as the sampler calls them."""
    find = library.unrecorded("find_largest")
    add = library.unrecorded("sum_mass")
    convert = library.unrecorded("find_mass")
    add_above = library.unrecorded("sum_above")

    def find_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, groups = logits.shape[0], logits.shape[1] // GROUP
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

    def find_mass(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
        logits, peak, temperature = logits.contiguous(), peak.contiguous(), temperature.contiguous()
        convert(logits.data_ptr(), peak.data_ptr(), temperature.data_ptr(), *logits.shape)
        return logits

    def sum_above(masses: Tensor, floor: Tensor) -> Tensor:
        masses, floor = masses.contiguous(), floor.contiguous()
        sums = torch.empty(len(masses))
        add_above(masses.data_ptr(), floor.data_ptr(), len(masses), sums.data_ptr())
        return sums

    return Scan(find_largest, sum_mass, find_mass, sum_above)


def bind_forbid(library: Library) -> Forbid:
    """The function that writes bounds into logits."""
    write = library.unrecorded("forbid")

    def forbid(logits: Tensor, bits: RowBits) -> None:
        rows, words = np.ascontiguousarray(bits.rows), np.ascontiguousarray(bits.words)
        count, vocab_size = len(rows), logits.shape[1]
        fits = words.shape == (count, -(-vocab_size // WORD)) and ((rows >= 0) & (rows < len(logits))).all()
        if not (fits and logits.is_contiguous()):
            raise ValueError(f"bits {words.shape} of {count} rows do not fit logits {tuple(logits.shape)}")
        write(logits.data_ptr(), rows.ctypes.data, count, words.ctypes.data, vocab_size)

    return forbid
