"""The places of media among the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from models.media.positions import three_axes
from worker.protocol import MediaPlace


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """The media of a sequence, and the positions in whose place their E embeddings are put."""

    items: Sequence[MediaPlace]
    positions: np.ndarray  # [E], rising
    ends: np.ndarray  # [E] the last position of the run to which each belongs
    firsts: list[int]
    """For each item its first embedding among all, and behind them E."""
    axes: np.ndarray | None  # [3, end] the positions of tokens up to `end`, if they have three axes
    shift: int
    """What is added to the places of tokens behind it."""

    @property
    def end(self) -> int:
        """The position behind the last embedding."""
        return int(self.positions[-1]) + 1

    @classmethod
    def of(cls, items: Sequence[MediaPlace], *, on_axes: bool) -> PlacedMedia:
        runs = np.array([(item.at + first, length) for item in items for first, length in item.runs])
        starts, lengths = runs.T
        behind = np.cumsum(lengths)
        positions = np.arange(behind[-1]) + np.repeat(starts - behind + lengths, lengths)
        counts = [sum(length for _, length in item.runs) for item in items]
        axes, shift = three_axes(int(positions[-1]) + 1, items) if on_axes else (None, 0)
        ends, firsts = np.repeat(starts + lengths - 1, lengths), [0, *accumulate(counts)]
        return cls(items, positions, ends, firsts, axes, shift)
