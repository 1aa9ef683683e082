"""The places where states of a step's sequences are read and written. No torch, because engines plan them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_KEPT = 3
"""The most states of a sequence that a step keeps beside the last one."""


STATE_COLUMNS = 2 + 2 * MOST_KEPT
"""The numbers that kernels read of each sequence."""


class StateRow(NamedTuple):
    """The places of one sequence's states, which are rows of the layers' tensors."""

    source: int
    """The place of the state before this step, which is read unless the sequence begins here."""
    target: int
    """The place of the state after it."""
    kept: tuple[tuple[int, int], ...] = ()
    """Pairs (count, place): the state after so many tokens is written there, too."""


def state_columns(rows: Sequence[StateRow]) -> list[list[int]]:
    """The table [STATE_COLUMNS, B] that kernels read.

    Its rows are sources, targets, then counts and places of what is kept. A count is 0 where nothing is.
    """
    kept = [(*row.kept, *((0, 0),) * (MOST_KEPT - len(row.kept))) for row in rows]
    columns = [[row.source for row in rows], [row.target for row in rows]]
    for index in range(MOST_KEPT):
        columns += [[each[index][0] for each in kept], [each[index][1] for each in kept]]
    return columns
