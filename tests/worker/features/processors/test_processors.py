"""Logits processors: batches that keep their places, what is forbidden, and classes that break."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import worker_config

from worker.features.processors.custom_processors import Processors
from worker.options import WorkerOptions
from worker.protocol import REFUSED_ARGUMENTS, NewSeq, Sampling

NOBODY = 8
BUG = "RuntimeError: the operator's bug"


def open_processors(*names: str) -> Processors:
    options = WorkerOptions(logits_processors=[f"operator_plugins:{name}" for name in names])
    return Processors(worker_config(options=options), torch.device("cpu"), NOBODY)


def admit(processors: Processors, slot: int, tokens: list[int] | None = None, **arguments: Any) -> None:
    params = Sampling(max_tokens=4, extra_args=arguments)
    processors.admit(NewSeq(slot, tokens or [1, 2], 2, params))


def step(processors: Processors, *slots: int) -> tuple[torch.Tensor, dict[int, str]]:
    """The logits of these slots after a step; each row was 0, 1, 2, ... before."""
    logits = torch.arange(6.0).repeat(len(slots), 1)
    return logits, processors.apply(logits, slots, torch.tensor([5] * len(slots)))


def chosen(logits: torch.Tensor) -> list[int]:
    return logits.argmax(1).tolist()


def test_each_request_gets_what_it_asks_for_wherever_its_row_stands() -> None:
    processors = open_processors("OneToken")
    for slot in range(4):
        admit(processors, slot, target_token=slot)
    admit(processors, 4)
    assert chosen(step(processors, 0, 1, 2, 3, 4)[0]) == [5] * 5, "the first token is free"
    assert chosen(step(processors, 0, 1, 2, 3, 4)[0]) == [0, 1, 2, 3, 5]
    assert chosen(step(processors, 4, 3, 1)[0]) == [5, 3, 1], "two have ended, and rows have changed places"
    admit(processors, 0, target_token=2)
    assert chosen(step(processors, 0, 1, 4, 3)[0]) == [5, 1, 5, 3], "another sequence has the slot"
    assert chosen(step(processors, 2, 0)[0]) == [2, 2], "one that left out steps goes on"


def test_what_a_preempted_sequence_had_written_is_its_output() -> None:
    processors = open_processors("OneToken")
    admit(processors, 0, [1, 2, 3], target_token=4)
    assert chosen(step(processors, 0)[0]) == [4]


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, 7)), max_size=12), st.randoms(use_true_random=False))
def test_batches_hold_what_is_right_for_every_row(steps: list[set[int]], random: Any) -> None:
    processors = open_processors("OneToken")
    for slot in range(8):
        admit(processors, slot, [1, 2, 3], target_token=slot % 6)
    for slots in filter(None, steps):
        order = random.sample(sorted(slots), len(slots))
        assert chosen(step(processors, *order)[0]) == [slot % 6 for slot in order]


def test_what_is_forbidden_stays_so_and_wins_where_nothing_else_is_left() -> None:
    processors = open_processors("OneToken")
    admit(processors, 0, [1, 2, 3], target_token=4)
    admit(processors, 1, [1, 2, 3], target_token=5)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, -torch.inf, 5.0]]).repeat(2, 1)
    assert processors.apply(logits, [0, 1], torch.tensor([3, 3])) == {}
    assert logits[0].tolist() == [0.0, 1.0, 2.0, 3.0, -torch.inf, 5.0]
    assert logits[1].tolist() == [*[-torch.inf] * 5, 5.0]


def test_one_that_breaks_harms_its_own_request() -> None:
    processors = open_processors("OneToken")
    admit(processors, 0, [1, 2, 3], target_token=4)
    admit(processors, 1, crash=True)
    admit(processors, 2, [1, 2, 3], target_token=3)
    logits, failed = step(processors, 0, 1, 2)
    assert failed == {1: "the logits processor operator_plugins:OneToken failed: " + BUG}
    assert logits[1].isnan().all() and chosen(logits[[0, 2]]) == [4, 3]
    assert chosen(step(processors, 2, 0)[0]) == [3, 4], "others go on"


def test_arguments_are_refused_by_the_class() -> None:
    processors = open_processors("OneToken")
    admit(processors, 0, target_token="x")
    admit(processors, 1, [1, 2, 3], target_token=4)
    logits, failed = step(processors, 0, 1)
    assert failed == {0: f"{REFUSED_ARGUMENTS}target_token should be a token id, got 'x'"}
    assert chosen(logits[1:]) == [4]


def test_the_slot_of_no_request_is_left_alone() -> None:
    processors = open_processors("OneToken")
    admit(processors, NOBODY, crash=True)
    assert step(processors, NOBODY)[1] == {}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoSuch", "module 'operator_plugins' has no attribute 'NoSuch'"),
        ("Extension", "it has no methods update_state and apply"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match="--logits-processors operator_plugins:") as refused:
        open_processors(name)
    assert said in str(refused.value)
