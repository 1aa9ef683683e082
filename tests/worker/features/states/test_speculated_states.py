"""States go on by guesses that hold: those of slots, and those that are remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_drafts import alone
from opened import feature_of, open_runner
from tiny import tiny_checkpoint

from worker.features.states.state_steps import States
from worker.kernels.cpu import operations, torch_operations
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput, StepOutput

SIZES: dict[str, Any] = {
    "max_num_seqs": 6,
    "block_size": 4,
    "num_gpu_blocks_override": 96,
    "max_model_len": 64,
}
PROMPT = [5, 17, 40, 99, 250, 31, 8]
PARAMS = Sampling(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("by_torch", [False, True])
def test_states_are_those_without_guesses(
    hybrid: Path, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that would be remembered behind a guess is not, if the guess does not hold."""
    if by_torch:
        monkeypatch.setattr(operations, "choose_kernels", lambda: (None, torch_operations.TABLE))
    runner = open_runner(hybrid, **SIZES, dtype="float32", state_snapshots=4, guesses=True)
    states = feature_of(runner, States)
    assert states.memory is not None
    rows, first = states.memory._rows, runner._slots.count + 1
    (truth,) = alone(runner, [(PROMPT, PARAMS)])
    rows.zero_()

    def step(start: int, count: int, **options: Any) -> StepOutput:
        new = [NewSeq(0, PROMPT, 7, PARAMS)] if not start else []
        seq = SeqStep(0, start, count, [0, 1, 2, 3] if new else [], True, max(0, start - 6), **options)
        return runner.launch(StepInput(1, new, [seq], fresh=bool(new))).result()

    def places(*numbers: int) -> torch.Tensor:
        return rows[[0, *(first + number for number in numbers)]].clone()

    step(0, 7)
    step(7, 1)
    for number, start in enumerate(range(8, 11)):
        step(start, 1, kept=((1, number),) if number < 2 else ())
    expected, wrong = places(0, 1), truth.output[4] + 1
    step(0, 7)
    output = step(7, 1, guesses=[*truth.output[1:4], wrong], kept=((2, 2), (3, 3), (5, 1)))
    assert output.held == {0: truth.output[1:4]}
    if by_torch:  # its products differ by their rows
        torch.testing.assert_close(places(2, 3), expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(places(2, 3), expected)
        assert torch.equal(places(1)[1], expected[2]), "the last guess was wrong"
    runner.close()


def test_more_guesses_than_have_room_are_refused(hybrid: Path) -> None:
    runner = open_runner(hybrid, **{**SIZES, "max_num_seqs": 1, "max_num_batched_tokens": 8}, guesses=True)
    row = SeqStep(0, 0, 2, [0, 1, 2, 3], True, guesses=[9] * 9)
    with pytest.raises(ValueError, match="has 9 guesses, of 8 at most"):
        runner.launch(StepInput(1, [NewSeq(0, [5, 6], 2, PARAMS)], [row]))
