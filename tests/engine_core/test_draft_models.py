"""A draft model guesses what it would write by itself, and changes no bit of an answer."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from drafted import SIZES, Answer, answer, asked_at_random, greedy_by, opened, requests
from opened import feature_of
from ranks import Layout, Ranks, make
from tiny import VOCAB_SIZE, tiny_checkpoint

from engine_core.features.speculation.model_speculator import ModelSpeculator
from engine_core.protocol import AddRequest
from worker.features.speculation.draft_model import DraftModel
from worker.protocol import Sampling

TARGET = "LlamaForCausalLM"
DRAFTERS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "GPT2LMHeadModel": {},
}
"""Other heads than the model's; windows and soft caps; learned positions."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(TARGET, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as drafter: its guesses nearly always hold."""
    return tiny_checkpoint(TARGET, tmp_path_factory.mktemp("same"))


def compare(
    target: Path, drafter: Path, asked: list[AddRequest], seed: int = 0, make: Any = None, **options: Any
) -> Any:
    """Answers with the drafter and without are equal; returns what it guessed, and the statistics."""
    sizes = {name: options.get(name, size) for name, size in SIZES.items()}
    with opened(target, **sizes) as engine:
        truth: list[Answer] = answer(engine, asked)
    with (
        asked_at_random(Random(seed)) as drafted,
        opened(target, drafter, make, **{**SIZES, **options}) as engine,
    ):
        assert engine.ready.worker.drafts
        found, stats = answer(engine, asked), engine.stats()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in truth]
    assert found == truth or options.get("pipeline_parallel_size", 1) > 1, "stages cut prompts otherwise"
    assert stats.guesses is not None and stats.guesses.guessed > 30
    return drafted, stats


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_writes_what_it_writes_alone(name: str, target: Path, tmp_path: Path) -> None:
    """Its guesses are those of transformers' model, behind chunks, shared prefixes and preemptions."""
    drafter = tiny_checkpoint(name, tmp_path, **DRAFTERS[name])
    drafted, stats = compare(target, drafter, requests(Random(1)))
    assert stats.preemptions and stats.prefix_hits, "the schedule is one of all kinds"
    oracle = getattr(transformers, name).from_pretrained(drafter, dtype=torch.float32).eval()
    assert len(drafted.drafts) > 40
    for tokens, guesses in drafted.drafts:
        assert guesses == greedy_by(oracle, tokens, len(guesses))


def test_guesses_of_the_same_model_hold(target: Path, same: Path) -> None:
    """Guesses of greedy answers are right, as all weights are the same."""
    _, stats = compare(target, same, requests(Random(2)))
    assert sum(stats.guesses.held) == stats.guesses.guessed


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_drawn_answers(drawn: bool, target: Path, same: Path) -> None:
    """Guesses that are drawn by the request's own numbers and options hold; likeliest ones do at times."""
    asked = requests(Random(3), temperature=1.2, top_p=0.95, seed=5, repetition_penalty=1.2)
    method = {"draft_sample_method": "probabilistic" if drawn else "greedy"}
    _, stats = compare(target, same, asked, drafting=method)
    assert (sum(stats.guesses.held) == stats.guesses.guessed) == drawn


@pytest.mark.parametrize(
    ("layout", "drafting"),
    [(Layout(2), {}), (Layout(2), {"draft_tensor_parallel_size": 1}), (Layout(1, 2), {})],
    ids=["divided", "whole", "in the last stage"],
)
def test_ranks(layout: Layout, drafting: dict[str, int], target: Path, same: Path, ranks: Ranks) -> None:
    cut = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.stages}
    asked, executor = requests(Random(4)), make(ranks, layout, [])
    _, stats = compare(target, same, asked, 0, executor, drafting=drafting, **cut)
    assert sum(stats.guesses.held) == stats.guesses.guessed


def test_bfloat16_int8_and_a_model_with_windows(tmp_path: Path, same: Path) -> None:
    """The layers of both lie in the groups of the cache."""
    target = tiny_checkpoint("Gemma2ForCausalLM", tmp_path)
    sizes = {**SIZES, "num_gpu_blocks_override": 500, "max_model_len": 400, "dtype": "bfloat16"}
    kinds: list[dict[str, Any]] = [{}, {"quantization": "int8"}]
    for options in kinds:
        with opened(target, **sizes, **options) as engine:
            truth = answer(engine, requests(Random(5)))
        with asked_at_random(Random(5)), opened(target, same, **sizes, **options) as engine:
            assert len(engine.ready.worker.windows) > 1
            assert answer(engine, requests(Random(5))) == truth


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "GptOssForCausalLM", "BambaForCausalLM"])
def test_other_kinds_of_caches(name: str, same: Path, tmp_path: Path) -> None:
    """The drafter's keys and values lie beside latent entries, or beside windows with sinks."""
    compare(tiny_checkpoint(name, tmp_path), same, requests(Random(7)), num_gpu_blocks_override=90)


def test_by_itself_it_guesses_if_that_pays(target: Path, same: Path) -> None:
    with opened(target, same, **SIZES) as engine:
        answer(engine, requests(Random(6)))
        guesses = engine.stats().guesses
    assert guesses is not None and guesses.drafts


def refused(target: Path, drafter: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as error, opened(target, drafter, **{**SIZES, **options}):
        pass
    return str(error.value)


def test_drafters_that_do_not_fit_are_refused(target: Path, same: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(TARGET, tmp_path / "vocabulary", vocab_size=VOCAB_SIZE + 8)
    assert f"knows {VOCAB_SIZE + 8} tokens, and {target} {VOCAB_SIZE}" in refused(target, other)
    short = tiny_checkpoint(TARGET, tmp_path / "short", max_position_embeddings=64)
    assert "was made for 64 positions, and texts may have 80 tokens" in refused(target, short)
    assert "the drafter cannot be read: " in refused(target, tmp_path / "nothing here")
    encoder = tiny_checkpoint("BertModel", tmp_path / "encoder")
    assert "BertModel has no head that generates" in refused(target, encoder)
    hybrid = tiny_checkpoint("MambaForCausalLM", tmp_path / "states")
    assert "MambaForCausalLM cannot be a drafter" in refused(target, hybrid)
    assert "a model that only pools" in refused(target, same, tasks=["embed"])
    three = {"drafting": {"draft_tensor_parallel_size": 3}}
    assert "draft_tensor_parallel_size is 1 or 1" in refused(target, same, **three)


def test_a_pass_is_saved_where_its_guesses_are_verified(
    target: Path, same: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries of guesses are computed once: of 5 passes for 4 guesses, one is left out."""
    monkeypatch.setattr(ModelSpeculator, "lengths", lambda self, seqs: dict.fromkeys(seqs, 4))
    passes = list[int]()
    step = DraftModel._step  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        DraftModel, "_step", lambda self, first, rows: passes.append(len(first)) or step(self, first, rows)
    )
    with opened(target, same, **SIZES) as engine:
        extended = list[int]()
        drafter: Any = feature_of(engine._executor._runner, DraftModel)  # pyright: ignore
        forward = drafter._forward
        drafter._forward = lambda *given: extended.append(len(given[0])) or forward(*given)
        answer(engine, [AddRequest(id=1, tokens=[5, 9, 8], params=Sampling(max_tokens=40, temperature=0))])
        held = engine.stats().guesses
    assert held is not None and sum(held.held) == held.guessed
    assert len(extended) - len(passes) <= 4, "the prompt, the first token, and the end of the answer"
    assert sum(passes) >= 6, "all guesses hold, so the last one's entry is computed with the next token"
