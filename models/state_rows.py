"""The places where states of a step's sequences are read and written. No torch, because engines plan them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_KEPT = 3
"""The most states of a sequence that a step keeps beside the last one."""


STATE_COLUMNS = 3 + 2 * MOST_KEPT
"""The numbers that kernels read of each sequence."""

NOWHERE = -1
"""The source of a row of which nothing is computed, and the target of one that writes no state."""


class StateRow(NamedTuple):
    """The places of one sequence's states, which are rows of the layers' tensors."""

    source: int
    """The place of the state before this step, which is read unless the sequence begins here."""
    target: int
    """The place of the state after it."""
    kept: tuple[tuple[int, int], ...] = ()
    """Pairs (count, place): the state after so many tokens is written there, too."""
    more: int = 0
    """The tokens that it has beside those of its row: guesses, whose rows follow and have no source. Less
    than 0: only the first tokens of the row are computed."""


def state_columns(rows: Sequence[StateRow]) -> list[list[int]]:
    """The table [STATE_COLUMNS, B] that kernels read.

    Its rows are sources, targets, then counts and places of what is kept, and further tokens. A count is 0
    where nothing is kept.
    """
    kept = [(*row.kept, *((0, 0),) * (MOST_KEPT - len(row.kept))) for row in rows]
    columns = [[row.source for row in rows], [row.target for row in rows]]
    for index in range(MOST_KEPT):
        columns += [[each[index][0] for each in kept], [each[index][1] for each in kept]]
    return [*columns, [row.more for row in rows]]
