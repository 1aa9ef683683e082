"""The adapters of a step's tokens, as layouts of steps send them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

Run = tuple[int, int, int]
"""The number of an adapter, the first token of a step that has it, and the count of those in one run."""


def numbers_of(runs: Sequence[Run], tokens: int) -> array[int]:
    """The number of each token's adapter, and behind them the words of `AdapterRows.runs`."""
    numbers = array("i", bytes(4 * tokens))
    for number, first, count in runs:
        numbers[first : first + count] = array("i", [number]) * count
    numbers.append(len(runs))
    for run in runs:
        numbers.extend(run)
    return numbers
