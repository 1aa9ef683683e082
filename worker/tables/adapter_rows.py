"""The adapters of a step's tokens, as layouts of steps send them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.context import AdapterRows, ForwardContext
from worker.tables.positions import Show
from worker.tables.staging import Packet

Run = tuple[int, int, int]
"""The number of an adapter, the first token of a step that has it, and the count of those in one run."""


@dataclass(frozen=True, slots=True)
class AdapterReads:
    """The adapters that a step reads if some tokens have one: all recordings of such steps have them."""

    runs: Sequence[Run]
    tokens: int
    in_single: bool = True
    in_mixed: bool = True

    def stage(self, packet: Packet) -> Show:
        words = packet.ints(np.array(numbers_of(self.runs, self.tokens)))
        numbers, runs = words[: self.tokens], words[self.tokens :]

        def show(context: ForwardContext) -> None:
            if (known := context.adapters) is None:
                context.adapters = AdapterRows(numbers, runs, self.runs)
                return
            known.numbers.copy_(numbers)  # recordings of small steps read them there
            known.runs[: len(runs)] = runs
            known.host = self.runs

        return show


def numbers_of(runs: Sequence[Run], tokens: int) -> array[int]:
    """The number of each token's adapter, and behind them the words of `AdapterRows.runs`."""
    numbers = array("i", bytes(4 * tokens))
    for number, first, count in runs:
        numbers[first : first + count] = array("i", [number]) * count
    numbers.append(len(runs))
    for run in runs:
        numbers.extend(run)
    return numbers
