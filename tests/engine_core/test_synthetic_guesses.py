"""Guesses that hold by chance: what a drafter would cost of which only the size is known."""

from pathlib import Path

import pytest
from drafted import SIZES, answer, opened
from tiny import tiny_checkpoint

from engine_core.config import EngineConfig
from engine_core.guess_options import read_guess_options
from engine_core.protocol import Add
from engine_core.scheduling.guesses.model_guesser import ModelGuesser
from models.config import ConfigError
from worker.options import WorkerOptions
from worker.protocol import Sampling

DUMMY = WorkerOptions(load_format="dummy")


def rates(**given: object) -> tuple[float, ...]:
    asked = {"model": "a/b", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic", **given}
    options = read_guess_options(EngineConfig(model="m", worker=DUMMY, speculative_config=asked))
    assert options is not None
    return options.rates


def test_a_length_is_spent_on_first_guesses() -> None:
    assert rates(synthetic_acceptance_length=2.25) == (1.0, 0.25, 0.0)
    assert rates(synthetic_acceptance_length=1) == (0.0, 0.0, 0.0)
    assert rates(synthetic_acceptance_length=4) == (1.0, 1.0, 1.0)
    assert rates(synthetic_acceptance_rates=[0.9, 0.5, 0.5]) == (0.9, 0.5, 0.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs one of synthetic_acceptance_rates and synthetic_acceptance_length"),
        (
            {"synthetic_acceptance_length": 4.5},
            "synthetic_acceptance_length is a number from 1 to 4, not 4.5",
        ),
        ({"synthetic_acceptance_rates": [0.9, 0.5]}, "for each of num_speculative_tokens, which are 3 here"),
        ({"synthetic_acceptance_rates": [0.5, 0.9, 0.1]}, "none larger than the one before"),
        ({"synthetic_acceptance_rates": "all"}, "numbers from 0 to 1"),
        ({"method": "ngram", "model": None}, "needs --load-format dummy and a method with a drafter"),
    ],
)
def test_refusals(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rates(**given)


def test_guesses_hold_as_often_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are random, as those of a drafter that nobody has trained yet."""
    monkeypatch.setattr(ModelGuesser, "lengths", lambda self, seqs: dict.fromkeys(seqs, 4))
    target = tiny_checkpoint("LlamaForCausalLM", tmp_path / "target")
    drafter = tiny_checkpoint("Qwen3ForCausalLM", tmp_path / "drafter")
    asked = {
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 0.7, 0.3, 0.0],
    }
    sizes = {**SIZES, "num_gpu_blocks_override": 400, "max_model_len": 400, "load_format": "dummy"}
    requests = [
        Add(id, [5 + id, 9, 8], Sampling(max_tokens=300, temperature=id % 2, seed=id // 3)) for id in range(4)
    ]
    with opened(target, drafter, drafting=asked, **sizes) as engine:
        answers = answer(engine, requests)
        guesses = engine.stats().guesses
    assert [len(tokens) for tokens, _ in answers] == [300] * 4
    assert guesses is not None and guesses.drafts > 300
    found = [held / guesses.drafts for held in guesses.held]
    assert found[0] > 0.98, "but for the last draft of an answer, which is cut"
    assert found[1:3] == pytest.approx([0.7, 0.3], abs=0.08) and not any(found[3:])
