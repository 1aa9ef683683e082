"""The first stage takes the tokens of the last one in time, and no stage waits for another to receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Layout
from torch import Tensor

from models.parallel.parallel import Exchange
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.ranks.pipeline_stage import Stage
from worker.ranks.process_groups import Links
from worker.sampling.sampler import GREEDY, SampleTargets

IN_FLIGHT = 3
WIDTH = 4


class FakeTransfer:
    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


class FakeGroup:
    exact = False

    """A group that hands every tensor to whoever asks, and notes for which transfers somebody waited."""

    def __init__(self) -> None:
        self.queue: deque[Tensor] = deque()
        self.sent: list[FakeTransfer] = []

    def send(self, x: Tensor, to: int) -> Exchange:
        self.queue.append(x.clone())
        self.sent.append(FakeTransfer())
        return self.sent[-1]

    def receive(self, x: Tensor, source: int) -> None:
        x.copy_(self.queue.popleft())

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def stages() -> Iterator[tuple[Stage, Stage, FakeGroup]]:
    """The first stage, the last one, and the group that carries tokens between them."""
    stream, tokens = FakeGroup(), FakeGroup()
    number = torch.zeros(1)
    stream.queue.append(number)
    tokens.queue.append(number)
    first, last = (
        Stage(place, Links(stream, tokens), torch.empty(0, 2), IN_FLIGHT) for place in Layout(1, 2).places("")
    )
    stream.queue.clear()
    tokens.queue.clear()
    yield first, last, tokens


def step(*rows: int, new: tuple[int, ...] = ()) -> StepInput:
    params = Sampling(max_tokens=9)
    seqs = [SeqStep(row, 0, 1, [], samples=True) for row in rows]
    return StepInput(1, [NewSeq(row, [0], 1, params) for row in new], seqs)


def sampled(*rows: int, position: int = 1) -> SampleTargets:
    flat = torch.tensor([row * WIDTH + position for row in rows])
    return SampleTargets(torch.arange(len(rows)), flat, list(range(len(rows))), GREEDY, {})


def table() -> Tensor:
    return torch.zeros(8, WIDTH, dtype=torch.int32)


def send(stage: Stage, *tokens: int) -> None:
    stage.send_tokens(torch.tensor(tokens, dtype=torch.int32))


def test_tokens_are_taken_when_their_sequence_goes_on(stages: tuple[Stage, Stage, FakeGroup]) -> None:
    first, last, group = stages
    texts = table()
    first.send_stream(torch.zeros(2, 2), step(3, 5), sampled(3, 5))
    first.send_stream(torch.zeros(1, 2), step(1), sampled(1, position=2))
    first.receive_tokens(step(0), texts)  # nothing is there to be taken, and nothing is needed
    send(last, 33, 55)
    send(last, 11)
    first.receive_tokens(step(0), texts)
    assert len(group.queue) == 2
    first.receive_tokens(step(5), texts)
    assert (texts[3, 1], texts[5, 1], texts[1, 2]) == (33, 55, 0)
    first.receive_tokens(step(1), texts)
    assert texts[1, 2] == 11
    assert not group.queue


def test_a_slot_that_gets_a_new_sequence_waits_for_late_tokens(
    stages: tuple[Stage, Stage, FakeGroup],
) -> None:
    first, last, group = stages
    texts = table()
    first.send_stream(torch.zeros(1, 2), step(3), sampled(3))
    send(last, 33)
    first.receive_tokens(step(3, new=(3,)), texts)
    assert not group.queue, "or it would be written over the new text later"
    first.send_stream(torch.zeros(1, 2), step(4), sampled(4))
    send(last, 44)
    first.receive_tokens(step(0, new=(4,)), texts)
    assert not group.queue


def test_tokens_that_nobody_needs_do_not_pile_up(stages: tuple[Stage, Stage, FakeGroup]) -> None:
    first, last, group = stages
    texts = table()
    for row in range(7):
        first.receive_tokens(step(row), texts)
        first.send_stream(torch.zeros(1, 2), step(row), sampled(row))
        send(last, row)
    assert len(group.queue) == IN_FLIGHT
    assert texts[:4, 1].tolist() == [0, 1, 2, 3]


def test_a_step_that_samples_nothing_is_not_waited_for(stages: tuple[Stage, Stage, FakeGroup]) -> None:
    first, _, _ = stages
    for _ in range(9):
        first.send_stream(torch.zeros(1, 2), step(0), None)
        first.receive_tokens(step(0), table())


def test_only_steps_that_are_long_over_are_waited_for(stages: tuple[Stage, Stage, FakeGroup]) -> None:
    _, last, group = stages
    for number in range(6):
        send(last, number)
    assert [transfer.waited for transfer in group.sent[-6:]] == [True] * 2 + [False] * (IN_FLIGHT + 1)


@pytest.mark.parametrize("uses", [{"source": 7}, {"kept": ((1, 7),)}])
def test_a_state_behind_guesses_is_there_before_others_use_its_place(
    stages: tuple[Stage, Stage, FakeGroup], uses: dict[str, Any]
) -> None:
    """A step of other sequences may read the remembered state, or write another one there."""
    first, last, _ = stages
    landed = list[int]()
    for row, place in ((3, 7), (4, 5)):
        guessed = StepInput(1, [], [SeqStep(row, 8, 1, [], samples=True, kept=((2, place),))])
        first.send_stream(torch.zeros(1, 2), guessed, sampled(row), lambda place=place: landed.append(place))
        send(last, row)
    first.receive_tokens(step(0), table())
    assert not landed
    first.receive_tokens(StepInput(1, [], [SeqStep(0, 0, 1, [], samples=True, **uses)]), table())
    assert landed == [7]
