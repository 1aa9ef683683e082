"""The operations that merge rows of many sequences, in plain torch: each sequence is computed by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Place = tuple[int, int, int]
"""The first row of a sequence, the first that is merged, and the row behind its last."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The places of sequences among packed rows."""

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


Merge = Callable[[Tensor, int], Tensor]
"""The type of a function that merges rows [L, W], before which so many others are left out, to [1, W]."""


def pool(rows: Tensor, segments: Segments, mode: str, merge: Merge) -> Tensor:
    """Merge the rows of each sequence into one by `mode`: [N, W] -> [P, W] float32.

    `merge` does it for one, given those that are merged and how many come before them. It is given each
    apart, whose bits then depend on no other.
    """
    return torch.cat(
        [merge(rows[first:stop], first - start).float() for start, first, stop in segments.on_host]
    )


def apart(function: Callable[[Tensor], Tensor], rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Apply a function of rows [N, W], each for itself, to so many of them at a time -> [N, W'].

    Others change no bits of a row then, nor does its place in memory. A device that does not promise the same
    bits takes all rows at once.
    """
    return torch.cat([function(part.clone()) for part in rows.split(list(lengths))])


def normalize(rows: Tensor) -> Tensor:
    """Bring each row [R, W] float32 to length 1; a row of zeros stays as it is."""
    return F.normalize(rows, dim=-1)
