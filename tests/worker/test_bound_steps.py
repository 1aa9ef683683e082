"""A runner's steps whose bounds follow: they hold or the step breaks, and the next step is none the worse."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from opened import open_runner
from tiny import VOCAB_SIZE, tiny_checkpoint
from toy_language import bound_of

from worker.protocol import Bound, NewSeq, Sampling, SeqStep, StepBounds, StepInput
from worker.runner import Runner

PROMPT = [5, 6, 7]
ONE = bound_of([11], VOCAB_SIZE, "allowed")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))
    sizes = {"max_num_seqs": 4, "block_size": 4, "num_gpu_blocks_override": 16, "max_model_len": 16}
    return open_runner(folder, **sizes)


def read(number: int, *, bound: bool = True, slots: int = 2) -> StepInput:
    """A step that reads a prompt in each of these slots, and samples a token; nothing is left of others."""
    params = Sampling(max_tokens=9, temperature=0)
    new = [NewSeq(slot, PROMPT, len(PROMPT), params) for slot in range(slots)]
    seqs = [SeqStep(slot, 0, len(PROMPT), [slot], True, bound=bound and slot > 0) for slot in range(slots)]
    return StepInput(number, new, seqs, fresh=True)


def following(*bounds: StepBounds) -> Callable[[], StepBounds]:
    return deque(bounds).popleft


def test_bound_rows_sample_within_bounds_and_others_as_ever(runner: Runner) -> None:
    free = runner.launch(read(1, bound=False)).result().tokens
    assert runner.launch(read(2), following(StepBounds(2, {1: ONE}))).result().tokens == [free[0], 11]
    assert runner.launch(read(3), following(StepBounds(3, {1: None}))).result().tokens == free


@pytest.mark.parametrize(
    ("rows", "number"),
    [({}, 5), ({0: ONE}, 5), ({0: None, 1: ONE}, 5), ({1: ONE}, 6)],
    ids=["missing", "another row's", "one too many", "another step's"],
)
def test_missing_and_foreign_bounds_break_the_step(
    runner: Runner, rows: dict[int, Bound | None], number: int
) -> None:
    with pytest.raises(ValueError, match=r"bound"):
        runner.launch(read(5), following(StepBounds(number, rows)))
    later = following() if number == 6 else following(StepBounds(6, {1: ONE}))
    assert runner.launch(read(6), later).result().tokens[1] == 11


def test_a_bound_step_breaks_where_nobody_tells_bounds(runner: Runner) -> None:
    with pytest.raises(ValueError, match="nobody tells their bounds"):
        runner.launch(read(7))


def test_a_step_without_bound_rows_asks_for_nothing(runner: Runner) -> None:
    runner.launch(read(8, bound=False), following()).result()
    step = read(9)
    runner.launch(StepInput(9, step.new[:1], step.seqs[:1]), following()).result()


def test_each_guess_samples_within_bounds_of_its_own(runner: Runner) -> None:
    """Guesses within the bounds give the tokens, logprobs and texts that come one by one."""
    params = Sampling(max_tokens=9, seed=3, logprobs=2, allowed_token_ids=tuple(range(5, 200)))
    bounds = [None, *(bound_of(range(at, 300, 40), VOCAB_SIZE, "bits") for at in range(7)), None]
    new = [NewSeq(0, PROMPT, 3, params), NewSeq(1, PROMPT, 3, params)]
    first = [SeqStep(slot, 0, 3, [slot], True, bound=slot > 0) for slot in range(2)]
    alone: list[int] = []
    told: list[object] = []
    for number in range(len(bounds)):
        rows = [SeqStep(1, 2 + number, 1, [4 + number] * (number in (2, 6)), True, number, bound=True)]
        step = StepInput(number + 1, [] if number else new, rows if number else first, fresh=not number)
        output = runner.launch(step, following(StepBounds(step.number, {1: bounds[number]}))).result()
        alone.append(output.tokens[-1])
        told.append(output.logprobs[-1])
    assert all(token % 40 == at for at, token in enumerate(alone[1:-1]))

    step = StepInput(20, new, first, fresh=True)
    runner.launch(step, following(StepBounds(20, {1: bounds[0]}))).result()
    guesses = [*alone[1:5], (alone[5] + 1) % VOCAB_SIZE, 9]
    rows = [
        SeqStep(1, 3, 1, [6, 10], True, 1, bound=True, guesses=guesses),
        SeqStep(0, 3, 1, [5], True, 1, guesses=[4]),
    ]
    behind = StepBounds(21, {1: bounds[1]}, {1: [*bounds[2:6], None, None]})
    output = runner.launch(StepInput(21, [], rows), following(behind)).result()
    assert [*output.held[1], output.tokens[0]] == alone[1:6]
    assert [*output.held_logprobs[1], output.logprobs[0]] == told[1:6]


def test_bounds_of_some_guesses_only_break_the_step(runner: Runner) -> None:
    step = read(30)
    rows = [step.seqs[0], SeqStep(1, 0, 3, [1, 4], True, bound=True, guesses=[5, 6])]
    for guesses in ({}, {1: [ONE]}, {1: [ONE] * 3}, {0: [ONE] * 2}):
        with pytest.raises(ValueError, match=r"and \[1, 1, 1\] are bound"):
            runner.launch(
                StepInput(30, step.new, rows, fresh=True), following(StepBounds(30, {1: ONE}, guesses))
            )
    told = StepBounds(31, {1: ONE}, {1: [ONE, None]})
    output = runner.launch(StepInput(31, step.new, rows, fresh=True), following(told)).result()
    assert output.tokens[1] == 11 and not output.held
