"""When the first stage takes what the last one has sampled, and that nobody waits for a neighbour."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
import torch
from ranks import Layout
from torch import Tensor

from worker.batch import Sampled
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput
from worker.ranks.groups import Links, Pending
from worker.ranks.stage import Stage
from worker.sampling.sampler import Plan

IN_FLIGHT = 3
WIDTH = 4


class Arrived:
    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


class Post:
    """Carries what is sent to whoever asks, and notes for which of it was waited."""

    def __init__(self) -> None:
        self.letters: deque[Tensor] = deque()
        self.sent: list[Arrived] = []

    def send(self, x: Tensor, to: int) -> Pending:
        self.letters.append(x.clone())
        self.sent.append(Arrived())
        return self.sent[-1]

    def receive(self, x: Tensor, source: int) -> None:
        x.copy_(self.letters.popleft())

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def stages() -> Iterator[tuple[Stage, Stage, Post]]:
    """The first, the last, and the post from the last to the first."""
    stream, tokens = Post(), Post()
    greeting = torch.zeros(1)
    stream.letters.append(greeting)
    tokens.letters.append(greeting)
    first, last = (
        Stage(
            place,
            Links(stream, tokens),
            width=2,
            dtype=torch.float32,
            target=torch.device("cpu"),
            in_flight=IN_FLIGHT,
        )
        for place in Layout(1, 2).places("")
    )
    stream.letters.clear()
    tokens.letters.clear()
    yield first, last, tokens


def step(*rows: int, new: tuple[int, ...] = ()) -> StepInput:
    params = Sampling(max_tokens=9)
    return StepInput(
        number=1,
        new=[NewSeq(slot=row, tokens=[0], prompt_len=1, params=params) for row in new],
        seqs=[SeqStep(slot=row, start=0, count=1, blocks=[], samples=True) for row in rows],
    )


def sampled(*rows: int, position: int = 1) -> Sampled:
    return Sampled(
        at=torch.arange(len(rows)),
        places=torch.tensor([row * WIDTH + position for row in rows]),
        rows=list(range(len(rows))),
        plan=Plan(masks=None, penalties=[], draws=[], logprobs=[]),
    )


def table() -> Tensor:
    return torch.zeros(8, WIDTH, dtype=torch.int32)


def tell(stage: Stage, *tokens: int) -> None:
    stage.tell(torch.tensor(tokens, dtype=torch.int32))


def test_tokens_are_taken_when_their_sequence_goes_on(stages: tuple[Stage, Stage, Post]) -> None:
    first, last, post = stages
    texts = table()
    first.pass_on(torch.zeros(2, 2), step(3, 5), sampled(3, 5))
    first.pass_on(torch.zeros(1, 2), step(1), sampled(1, position=2))
    first.catch_up(step(0), texts)  # nothing is there to be taken, and nothing is needed
    tell(last, 33, 55)
    tell(last, 11)
    first.catch_up(step(0), texts)
    assert len(post.letters) == 2
    first.catch_up(step(5), texts)
    assert (texts[3, 1], texts[5, 1], texts[1, 2]) == (33, 55, 0)
    first.catch_up(step(1), texts)
    assert texts[1, 2] == 11
    assert not post.letters


def test_a_row_that_changes_hands_waits_for_late_tokens(stages: tuple[Stage, Stage, Post]) -> None:
    first, last, post = stages
    texts = table()
    first.pass_on(torch.zeros(1, 2), step(3), sampled(3))
    tell(last, 33)
    first.catch_up(step(3, new=(3,)), texts)
    assert not post.letters, "or it would be written over the new text later"
    first.pass_on(torch.zeros(1, 2), step(4), sampled(4))
    tell(last, 44)
    first.catch_up(step(0, new=(4,)), texts)
    assert not post.letters


def test_tokens_that_nobody_needs_do_not_pile_up(stages: tuple[Stage, Stage, Post]) -> None:
    first, last, post = stages
    texts = table()
    for row in range(7):
        first.catch_up(step(row), texts)
        first.pass_on(torch.zeros(1, 2), step(row), sampled(row))
        tell(last, row)
    assert len(post.letters) == IN_FLIGHT
    assert texts[:4, 1].tolist() == [0, 1, 2, 3]


def test_a_step_that_samples_nothing_is_not_waited_for(stages: tuple[Stage, Stage, Post]) -> None:
    first, _, _ = stages
    for _ in range(9):
        first.pass_on(torch.zeros(1, 2), step(0), None)
        first.catch_up(step(0), table())


def test_only_steps_that_are_long_over_are_waited_for(stages: tuple[Stage, Stage, Post]) -> None:
    _, last, post = stages
    for number in range(6):
        tell(last, number)
    assert [arrived.waited for arrived in post.sent[-6:]] == [True] * 2 + [False] * (IN_FLIGHT + 1)
