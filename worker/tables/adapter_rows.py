"""The adapters of a step's tokens, found by the slots of its rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from models.context import AdapterRows
from worker.tables.slots import Slots

Run = tuple[int, int, int]
"""The number of an adapter, the first token of a step that has it, and the count of those in one run."""


def adapter_runs(
    slots: Slots, numbers: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> list[Run]:
    """The runs of tokens with the same adapter, in the order of tokens; nothing if no token has one.

    The rows of a step have the slots `numbers`, and compute `counts` positions from `starts` on.
    """
    if slots.adapted.isdisjoint(numbers):
        return []
    runs: list[Run] = []
    for number, first, count in _runs_of_rows(slots, numbers, starts, counts):
        if runs and runs[-1][0] == number and sum(runs[-1][1:]) == first:
            first, count = runs[-1][1], runs.pop()[2] + count
        runs.append((number, first, count))
    return runs


def _runs_of_rows(
    slots: Slots, numbers: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> Iterator[Run]:
    token = 0
    for slot, start, count in zip(numbers, starts, counts, strict=True):
        number, begin = slots.adapters[slot]
        before = min(count, max(0, begin - start))
        if number and before < count:
            yield number, token + before, count - before
        token += count


def chosen_rows(rows: AdapterRows, chosen: Tensor | slice) -> AdapterRows:
    """The adapters of some tokens of a step. On a card these are known to kernels only."""
    numbers = rows.numbers[chosen]
    if not rows.host or numbers.is_cuda:
        return AdapterRows(numbers, rows.runs[:0], ())
    runs: list[Run] = []
    for number, group in groupby(enumerate(numbers.tolist()), key=itemgetter(1)):
        first, *others = (at for at, _ in group)
        runs += [(number, first, 1 + len(others))] * bool(number)
    words = torch.frombuffer(numbers_of(runs, len(numbers)), dtype=torch.int32)
    return AdapterRows(words[: len(numbers)], words[len(numbers) :], runs)


def numbers_of(runs: Sequence[Run], tokens: int) -> array[int]:
    """The number of each token's adapter, and behind them the words of `AdapterRows.runs`."""
    numbers = array("i", bytes(4 * tokens))
    for number, first, count in runs:
        numbers[first : first + count] = array("i", [number]) * count
    numbers.append(len(runs))
    for run in runs:
        numbers.extend(run)
    return numbers
