"""The positions of a sequence with media on three axes: time, rows and columns.

Text has one position on all three. It goes on behind a picture as if that were as long as its longer side,
and behind a video as if that were as long as its time, where this is more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

AXES = 3


class Placed(Protocol):
    """A media item in a sequence, as `worker.protocol.MediaPlace` says."""

    @property
    def at(self) -> int: ...

    @property
    def runs(self) -> Sequence[tuple[int, int]]: ...

    @property
    def grid(self) -> tuple[int, int, int]: ...

    @property
    def interval(self) -> float:
        """How far the frames of the grid lie apart on the axis of time."""
        ...


def three_axes(length: int, items: Sequence[Placed]) -> tuple[NDArray[np.int64], int]:
    """Find the positions [3, length] of a sequence's tokens, in which the items lie one behind the other. The
    number returned beside them is added to the place of a token behind these, to find its position on each
    axis: the generated tokens of a prompt have positions of their own only through it."""
    positions = np.empty((AXES, length), dtype=np.int64)
    done = shift = 0  # the tokens that have positions, and what is added to the places of others
    for item in items:
        rows, columns = _merged(item)
        for first, count in item.runs:  # a run has whole frames
            start, end = item.at + first, item.at + first + count
            positions[:, done:start] = np.arange(done, start) + shift
            sides = count // (rows * columns), rows, columns
            places = np.indices(sides).reshape(AXES, -1)
            places[0] = places[0].astype(np.float32) * np.float32(item.interval)  # as transformers rounds it
            positions[:, start:end] = places + (start + shift)
            # transformers forgets the time here, unlike the authors of the models.
            done, shift = end, start + shift + int(places.max()) + 1 - end
    positions[:, done:] = np.arange(done, length) + shift
    return positions, shift


def _merged(item: Placed) -> tuple[int, int]:
    """The rows and columns of embeddings in each frame, of which one stands for a square of patches."""
    embeddings: Any = sum(count for _, count in item.runs)
    side = math.isqrt(math.prod(item.grid) // embeddings)
    return item.grid[1] // side, item.grid[2] // side
