"""Engines that share experts compute some steps in halves: all of them or none, cut at these tokens."""

import logging
from collections.abc import Callable, Iterator, Sequence

import pytest
from fake_worker import facts, reference
from msgspec.structs import replace
from shared_experts import Group

from engine_core.config import EngineConfig
from engine_core.protocol import Add
from engine_core.ranks.joint_steps import Halving
from worker.protocol import Sampling, SeqStep, StepInput

Make = Callable[..., Group]


def step_of(counts: Sequence[int]) -> StepInput:
    seqs = [SeqStep(slot, 0, count, [], samples=True) for slot, count in enumerate(counts)]
    return StepInput(number=1, new=[], seqs=seqs)


@pytest.mark.parametrize(
    ("counts", "first"),
    [
        ([], 0),
        ([1, 1], 0),
        ([1, 1, 1], 1),
        ([1] * 8, 4),
        ([7], 0),
        ([8], 4),
        ([9], 4),
        ([1, 1, 1, 1, 7], 0),
        ([4, 4], 4),
        ([5, 4], 5),
        ([1, 1, 30], 16),
        ([30, 1, 1], 16),
        ([10, 1, 9, 2], 11),
        ([14, 18], 14),
        ([11, 21], 16),
    ],
)
def test_steps_are_cut_between_rows_or_in_the_middle_of_a_prompt(counts: list[int], first: int) -> None:
    assert Halving(decode_tokens=3, prompt_tokens=8).first_half(step_of(counts)) == first


def test_sizes_are_those_of_the_options() -> None:
    config = EngineConfig(model="", enable_dbo=True, dbo_decode_token_threshold=5)
    assert Halving.asked_for(config) == Halving(decode_tokens=5, prompt_tokens=512)
    assert Halving.asked_for(EngineConfig(model="")) is None


def test_a_single_token_is_never_cut() -> None:
    assert Halving(decode_tokens=1, prompt_tokens=1).first_half(step_of([1])) == 0


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Group] = []

    def make(*halvings: Halving | None, seed: int = 0) -> Group:
        made.append(Group([facts()] * len(halvings), seed, halvings=halvings))
        return made[-1]

    yield make
    for group in made:
        group.close()


def told(group: Group) -> list[tuple[list[int], list[int]]]:
    """The tokens and the first halves of every round, which all workers were told alike."""
    each = [[(step.replica_tokens, step.first_halves) for step in own.steps] for own in group.executors]
    assert all(rounds == each[0] for rounds in each)
    return each[0]


def write(group: Group, prompts: Sequence[list[int]], max_tokens: int = 6) -> None:
    for id, prompt in enumerate(prompts):
        request = Add(id=id, tokens=prompt, params=Sampling(max_tokens=max_tokens))
        group.add(id % len(group.engines), request)
    group.run()
    for id, prompt in enumerate(prompts):
        assert group.text(id) == reference(prompt, max_tokens)


@pytest.mark.parametrize("seed", range(4))
def test_all_engines_compute_halves_or_none_does(make: Make, seed: int) -> None:
    """A round has halves if each engine has enough tokens, and then all know where each is cut."""
    group = make(Halving(2, 6), Halving(2, 6), seed=seed)
    write(group, [[5, 6, 7, 8, 9, 10, 11], [8] * 9, [3, 4]])
    rounds = [halves for _, halves in told(group)]
    steps = zip(*(own.steps for own in group.executors), strict=True)
    wishes = [[Halving(2, 6).first_half(step) for step in each] for each in steps]
    assert rounds == [wish if all(wish) else [] for wish in wishes]
    assert any(rounds) and any(any(wish) and not all(wish) for wish in wishes)


def test_one_engine_that_wants_whole_steps_keeps_all_from_halves(make: Make) -> None:
    group = make(Halving(2, 6), None)
    write(group, [[5] * 12, [8] * 12, [3] * 12, [7] * 12])
    assert all(min(tokens) >= 2 for tokens, _ in told(group))
    assert not any(halves for _, halves in told(group))


def test_an_engine_without_requests_keeps_all_from_halves(make: Make) -> None:
    group = make(Halving(2, 6), Halving(2, 6))
    request = Add(id=0, tokens=[5] * 12, params=Sampling(max_tokens=3))
    group.add(0, request)
    group.run()
    assert group.text(0) == reference([5] * 12, 3)
    assert {tuple(halves) for _, halves in told(group)} == {()}


def test_the_log_says_where_halves_are_no_use(caplog: pytest.LogCaptureFixture) -> None:
    halving = Halving(2, 6)
    with caplog.at_level(logging.WARNING):
        assert halving.usable(replace(facts(), device="cuda")) is halving
        assert not caplog.messages
        assert halving.usable(replace(facts(), device="cpu")) is halving
        assert halving.usable(replace(facts(), causal=False)) is None
        assert halving.usable(replace(facts(), whole_media=True)) is None
    gains, encoder, pictures = caplog.messages
    assert "gains nothing here" in gains and "whole steps" in encoder and "pictures" in pictures


def test_each_guess_is_a_row_of_a_half() -> None:
    guessing = SeqStep(slot=0, start=9, count=1, blocks=[], samples=True, guesses=[7, 8, 9])
    step = StepInput(number=1, new=[], seqs=[guessing, *step_of([1, 1]).seqs])
    assert Halving(decode_tokens=6, prompt_tokens=1).first_half(step) == 3
    assert Halving(decode_tokens=7, prompt_tokens=1).first_half(step) == 0
