"""The places of sequences among packed rows, for operations that merge each sequence's rows into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Place = tuple[int, int, int]
"""The first row of a sequence, the first that is merged, and the row behind its last."""


@dataclass(frozen=True, slots=True)
class Segments:
    on_host: Sequence[Place]
    places: Tensor  # [P, 3] int32: the same on the device

    @classmethod
    def packed(
        cls, lengths: Sequence[int], skips: Sequence[int], send: Callable[[list[Place]], Tensor]
    ) -> Segments:
        """Sequences one behind the other, of which the first rows are not merged: those of an instruction.

        A sequence that is nothing but its instruction is merged whole, for no rows have no vector. `send`
        brings numbers to the device.
        """
        found: list[Place] = []
        first = 0
        for length, skip in zip(lengths, skips, strict=True):
            found.append((first, first + (skip if skip < length else 0), first + length))
            first += length
        return cls(found, send(found).view(-1, 3))

    @property
    def lengths(self) -> list[int]:
        """The rows of each sequence, merged or not."""
        return [stop - start for start, _, stop in self.on_host]

    def of(self, members: Sequence[int]) -> Segments:
        """Some of the sequences, in this order. No index goes to the device."""
        if [*members] == [*range(len(self.on_host))]:
            return self
        return Segments([self.on_host[i] for i in members], torch.stack([self.places[i] for i in members]))
