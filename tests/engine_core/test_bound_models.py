"""A real model whose answers are in a language: the same bits however far ahead steps are planned, over
ranks and stages, with C kernels and by torch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from scripted_speculator import ScriptedGuesser, use
from sizes import engine_config
from tiny import VOCAB_SIZE, tiny_checkpoint
from toy_language import Language, ToyMatcher

from engine_core.engine import Engine
from engine_core.protocol import AddRequest, Tokens
from engine_core.scheduling.sequence import Sequence
from worker.kernels.cpu import operations, torch_operations
from worker.protocol import Sampling

OUTPUT = 14
LANGUAGE = Language(vocab=VOCAB_SIZE, width=40, shortest=9)
WAKING = Language(vocab=VOCAB_SIZE, width=40, shortest=4, wakes=LANGUAGE.allowed([])[0])
PROMPTS = [[5, 17, 40, 99, 250, 31, 8], [300], [11, 12, 13, 11, 12, 13, 7, 200, 4, 90], [9, 9], [77, 3]]

Answers = dict[int, tuple[list[int], list[list[float]], str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def params(id: int) -> Sampling:
    """Greedy and random rows, with options that look back."""
    if id % 2:
        return Sampling(max_tokens=OUTPUT, seed=id, logprobs=2, frequency_penalty=0.5, bad_words=((7,),))
    return Sampling(max_tokens=OUTPUT, temperature=0)


def answers(folder: Path, *, bound: bool = True, **options: object) -> Answers:
    """What the requests get, all but one of which are in a language."""
    sizes = {"block_size": 4, "max_model_len": 64, "num_gpu_blocks_override": 20, "cpu_threads": 1}
    engine = Engine.start(engine_config(folder, **{**sizes, **options}), lambda _: None)
    languages = [LANGUAGE, LANGUAGE, WAKING, None, LANGUAGE]
    found: Answers = {}
    try:
        for id, (prompt, language) in enumerate(zip(PROMPTS, languages, strict=True)):
            matcher = ToyMatcher(language) if language is not None and bound else None
            engine.intake.add(0, AddRequest(id, prompt, params(id)), matcher)
        while engine.busy:
            for output in engine.step().get(0, []):
                assert isinstance(output, Tokens), output
                tokens, logprobs, _ = found.get(output.id, ([], [], ""))
                values = [entry.values for entry in output.logprobs]
                found[output.id] = [*tokens, *output.tokens], [*logprobs, *values], output.finish or ""
    finally:
        engine.stop()
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    found = answers(folder, steps_ahead=0)
    for id, language in enumerate([LANGUAGE, LANGUAGE, WAKING, None, LANGUAGE]):
        tokens, _, finish = found[id]
        if language is not None:
            assert language.holds(tokens)
            text = language.written(tokens)
            assert finish == ("stop" if text is not None and language.complete(text) else "length")
    assert found[3] == answers(folder, bound=False, steps_ahead=0)[3], "a row without bounds is as ever"
    assert "stop" in {finish for _, _, finish in found.values()}
    return found


@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_planning_ahead_changes_no_bit(folder: Path, expected: Answers, steps_ahead: int) -> None:
    assert answers(folder, steps_ahead=steps_ahead) == expected
    assert answers(folder, steps_ahead=steps_ahead, max_num_seqs=2) == expected


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_seqs": 2}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["all", "two at a time", "two ranks", "two stages"],
)
def test_guesses_change_no_bit(
    folder: Path, expected: Answers, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most guesses are right; others fit a language and are wrong, or do not fit it."""
    guesser = Knowing(random.Random(3), 5, 0.8, answers={id: each[0] for id, each in expected.items()})
    use(monkeypatch, guesser)
    assert answers(folder, **options) == expected
    assert sum(guesser.held) > 20 and guesser.guessed > sum(guesser.held) + 10


@dataclass
class Knowing(ScriptedGuesser):
    """Knows the answers that real models give."""

    answers: dict[int, list[int]] = field(default_factory=dict)

    def pays(self, seqs: object) -> bool:
        return True

    def guess(self, seq: Sequence, count: int) -> list[int]:
        right = self.answers[seq.id][len(seq.tokens) - seq.prompt_len :][:count]
        return [
            token if self.random.random() < self.chance else self.random.randrange(VOCAB_SIZE)
            for token in right
        ]


def test_without_kernels_texts_are_in_the_language_too(
    folder: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "choose_kernels", lambda: (None, torch_operations.TABLE))
    found = answers(folder, steps_ahead=1)
    assert {id: tokens for id, (tokens, _, _) in found.items()} == {
        id: tokens for id, (tokens, _, _) in expected.items()
    }
