"""A step is cut at any token: each half is a step as if it had been planned by itself."""

from __future__ import annotations

import pytest
import torch

from models.context import ForwardContext
from worker.steps.halves import cut_step

STARTS, COUNTS = [0, 7, 3], [5, 1, 4]
"""The tokens of three sequences that are there before a step, and those that it computes."""


def context_of(starts: list[int], counts: list[int], first_row: int = 0) -> ForwardContext:
    """A step of rows of which every number can be told; `first_row` is the number of the first."""
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    positions = [at for start, end in zip(starts, ends, strict=True) for at in range(start, end)]
    rows = [row for row, count in enumerate(counts, first_row) for _ in range(count)]
    slots = [100 * row + at for row, at in zip(rows, positions, strict=True)]
    return ForwardContext(
        positions=torch.tensor(positions),
        query_starts=torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
        kv_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=torch.arange(first_row, first_row + len(counts), dtype=torch.int32).view(-1, 1),
        slot_mapping=torch.tensor(slots),
        block_size=100,
        query_lens_host=counts,
        kv_lens_host=ends,
    )


def assert_equal(found: ForwardContext, expected: ForwardContext) -> None:
    for name in ForwardContext.__slots__:
        mine, other = getattr(found, name), getattr(expected, name)
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == other.dtype, name
            assert mine.tolist() == other.tolist(), name
        elif name != "replica_tokens":
            assert mine == other, name


@pytest.mark.parametrize(
    ("tokens", "first", "second"),
    [
        (1, ([0], [1]), ([1, 7, 3], [4, 1, 4], 0)),
        (5, ([0], [5]), ([7, 3], [1, 4], 1)),
        (6, ([0, 7], [5, 1]), ([3], [4], 2)),
        (8, ([0, 7, 3], [5, 1, 2]), ([5], [2], 2)),
    ],
)
def test_a_step_is_cut_between_rows_or_in_one(
    tokens: int, first: tuple[list[int], list[int]], second: tuple[list[int], list[int], int]
) -> None:
    """A sequence that is cut has a row in both halves."""
    whole = context_of(STARTS, COUNTS)
    whole.plan = {"of the whole step": 1}
    whole.replica_tokens = [30, 10]
    one, two = cut_step(whole, [11, tokens], 1)
    assert_equal(one, context_of(*first))
    assert_equal(two, context_of(*second))
    assert (one.replica_tokens, two.replica_tokens) == ([11, tokens], [19, 10 - tokens])


@pytest.mark.parametrize("first_halves", [[0, 5], [30, 5], [15, 10], [15], [15, 5, 1]])
def test_a_half_without_tokens_is_refused(first_halves: list[int]) -> None:
    whole = context_of(STARTS, COUNTS)
    whole.replica_tokens = [30, 10]
    with pytest.raises(ValueError, match="cannot have first halves of"):
        cut_step(whole, first_halves, 0)
