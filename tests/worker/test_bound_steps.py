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
