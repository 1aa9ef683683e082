"""Halves of a step: how it is cut, and that one computes while the other's exchange is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from models.context import ForwardContext, MediaRows, StateRows, context
from models.state_rows import StateRow, state_columns
from worker.features.experts.halves import Halves
from worker.protocol import StepInput
from worker.ranks.half_steps import HalfStepGroup, cut_step
from worker.sampling.token_bounds import nothing_follows
from worker.steps.compute import Compute
from worker.steps.feature import Hooks


@dataclass
class RecordedGroup:
    """A group of one rank, which notes what its exchanges and those who use it do."""

    events: list[str] = field(default_factory=list[str])
    exact = True
    closed = False

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> RecordedExchange:
        name = f"{int(out[0])}"
        self.events.append(f"begin {name}")
        return RecordedExchange(self, name, out[0], into[0])

    def close(self) -> None:
        self.closed = True


@dataclass
class RecordedExchange:
    group: RecordedGroup
    name: str
    out: Tensor
    into: Tensor

    def wait(self) -> None:
        self.into.copy_(self.out)
        self.group.events.append(f"end {self.name}")


@contextmanager
def open_group() -> Iterator[tuple[HalfStepGroup, RecordedGroup]]:
    recorded = RecordedGroup()
    group = HalfStepGroup(recorded, 0)
    try:
        yield group, recorded
    finally:
        group.close()
    assert recorded.closed


def half(
    group: HalfStepGroup, events: list[str], numbers: Sequence[int], failing: int = 0
) -> Callable[[], Tensor]:
    """A function that computes and exchanges each of these numbers in turns, but fails at one of them."""

    def compute() -> Tensor:
        total = torch.zeros(1)
        for number in numbers:
            events.append(f"compute {number}")
            if number == failing:
                raise ValueError(f"at {number}")
            into = torch.empty(1)
            group.exchange([torch.tensor([float(number)])], [into]).wait()
            total += into
        return total

    return compute


def test_one_half_computes_while_the_exchange_of_the_other_is_under_way() -> None:
    with open_group() as (group, recorded):
        results = group.compute_both(
            half(group, recorded.events, [1, 2]), half(group, recorded.events, [11, 12])
        )
        assert [float(each) for each in results] == [3, 23]
        assert recorded.events == [
            *("compute 1", "begin 1", "compute 11", "begin 11"),
            *("end 1", "compute 2", "begin 2", "end 11", "compute 12", "begin 12"),
            *("end 2", "end 12"),
        ]


def test_a_whole_step_waits_at_once() -> None:
    with open_group() as (group, recorded):
        half(group, recorded.events, [1, 2])()
        assert recorded.events == ["compute 1", "begin 1", "end 1", "compute 2", "begin 2", "end 2"]


@pytest.mark.parametrize(("failing", "ended"), [(1, []), (2, ["end 1"]), (11, []), (12, ["end 1", "end 11"])])
def test_an_error_in_one_half_ends_both(failing: int, ended: list[str]) -> None:
    """The error is that of the half that failed, and the next step can be computed."""
    with open_group() as (group, recorded):
        events = recorded.events
        with pytest.raises(ValueError, match=f"at {failing}$"):
            group.compute_both(
                half(group, events, [1, 2, 3], failing), half(group, events, [11, 12, 13], failing)
            )
        assert [event for event in events if event.startswith("end")] == ended
        results = group.compute_both(half(group, events, [4]), half(group, events, [5]))
        assert [float(each) for each in results] == [4, 5]


def test_a_step_with_first_halves_is_computed_in_turns() -> None:
    """Each half has its own tokens and context, and their hidden states come in the order of the tokens."""
    step = ForwardContext(
        positions=torch.arange(5),
        query_starts=torch.tensor([0, 5], dtype=torch.int32),
        kv_lens=torch.tensor([5], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(5),
        block_size=8,
        query_lens_host=[5],
        kv_lens_host=[5],
        replica_tokens=[5, 9],
    )
    seen: list[tuple[list[int], list[int], bool]] = []
    with open_group() as (group, recorded):

        def forward(ids: Tensor, positions: Tensor, stream: Tensor | None) -> Tensor:
            seen.append((positions.tolist(), context().replica_tokens, torch.is_inference_mode_enabled()))
            half(group, recorded.events, [int(ids[0])])()
            return ids[:, None].float()

        none: Any = None
        model = cast("Any", SimpleNamespace(forward=forward, modules=list))
        halves = Halves(group)
        compute = Compute(
            *(model, none),
            vocab_size=1,
            scan=none,
            draw=none,
            stage=None,
            generates=True,
            hooks=Hooks([halves]),
        )
        ids = torch.tensor([7, 8, 9, 10, 11])
        halves.before(StepInput(1, [], [], first_halves=[2, 4]), nothing_follows)
        assert compute.compute_hidden(ids, step).view(-1).tolist() == ids.tolist()
        assert seen == [([0, 1], [2, 4], True), ([2, 3, 4], [3, 5], True)]
        assert recorded.events == ["compute 7", "begin 7", "compute 9", "begin 9", "end 7", "end 9"]


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
        elif name not in ("replica_tokens", "others"):
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
    whole.others = [context_of(STARTS, COUNTS, 50)]
    one, two = cut_step(whole, [11, tokens], 1)
    assert_equal(one, context_of(*first))
    assert_equal(two, context_of(*second))
    assert_equal(one.others[0], context_of(*first, 50))
    assert_equal(two.others[0], context_of(*second[:2], 50 + second[2]))
    assert (one.replica_tokens, two.replica_tokens) == ([11, tokens], [19, 10 - tokens])


@pytest.mark.parametrize(
    ("tokens", "first", "second"),
    [
        (2, [StateRow(9, 0)], [StateRow(0, 0, ((1, 7), (3, 8))), StateRow(1, 1), StateRow(2, 2)]),
        (3, [StateRow(9, 0, ((3, 7),))], [StateRow(0, 0, ((2, 8),)), StateRow(1, 1), StateRow(2, 2)]),
        (6, [StateRow(9, 0, ((3, 7), (5, 8))), StateRow(1, 1)], [StateRow(2, 2)]),
    ],
)
def test_a_sequence_that_is_cut_goes_on_from_its_state(
    tokens: int, first: list[StateRow], second: list[StateRow]
) -> None:
    rows = [StateRow(9, 0, ((3, 7), (5, 8))), StateRow(1, 1), StateRow(2, 2)]
    whole = context_of(STARTS, COUNTS)
    whole.states = StateRows(torch.tensor(state_columns(rows), dtype=torch.int32), rows)
    whole.replica_tokens = [10]
    for half_step, expected in zip(cut_step(whole, [tokens], 0), (first, second), strict=True):
        assert half_step.states is not None and half_step.states.host == expected
        assert half_step.states.table.tolist() == state_columns(expected)


def test_media_are_cut_with_their_tokens() -> None:
    whole = context_of(STARTS, COUNTS)
    whole.media = MediaRows(
        torch.tensor([1, 2, 8]), torch.arange(3.0)[:, None], (torch.arange(3.0)[:, None],)
    )
    whole.axes = torch.arange(30).view(3, 10)
    whole.last = torch.arange(10, dtype=torch.int32)
    whole.replica_tokens = [10]
    one, two = cut_step(whole, [2], 0)
    assert one.media is not None and two.media is not None and one.axes is not None and two.axes is not None
    assert one.last is not None and two.last is not None
    assert (one.media.places.tolist(), two.media.places.tolist()) == ([1], [0, 6])
    for each, rows in ((one, [0.0]), (two, [1.0, 2.0])):
        assert each.media is not None
        assert each.media.rows.view(-1).tolist() == each.media.deeper[0].view(-1).tolist() == rows
    assert torch.equal(torch.cat([one.axes, two.axes], dim=1), whole.axes)
    assert one.last.tolist() + two.last.tolist() == list(range(10))


@pytest.mark.parametrize("first_halves", [[0, 5], [30, 5], [15, 10], [15], [15, 5, 1]])
def test_a_half_without_tokens_is_refused(first_halves: list[int]) -> None:
    whole = context_of(STARTS, COUNTS)
    whole.replica_tokens = [30, 10]
    with pytest.raises(ValueError, match="cannot have first halves of"):
        cut_step(whole, first_halves, 0)
