"""The adapters of a step's tokens, found by the slots of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from models.context import AdapterRows
from worker.tables.adapter_rows import Run, numbers_of
from worker.tables.positions import Columns


def adapter_runs(own: Sequence[tuple[int, int]], columns: Columns) -> list[Run]:
    """The runs of tokens with the same adapter, in the order of tokens.

    `own`: the number of each slot's adapter, 0 for none, and the first position that it computes.
    """
    runs: list[Run] = []
    for number, first, count in _runs_of_rows(own, columns):
        if runs and runs[-1][0] == number and sum(runs[-1][1:]) == first:
            first, count = runs[-1][1], runs.pop()[2] + count
        runs.append((number, first, count))
    return runs


def _runs_of_rows(own: Sequence[tuple[int, int]], columns: Columns) -> Iterator[Run]:
    token = 0
    for slot, start, count in zip(columns.slots, columns.starts, columns.counts, strict=True):
        number, begin = own[slot]
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
