"""Drafters that read hidden states guess what is published, and change no bit of an answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from draft_heads import (
    GUESSABLE,
    NextTokenOracle,
    Oracle,
    ScopedNextTokenOracle,
    write_eagle,
    write_eagle3,
    write_next_token,
    write_scoped_next_token,
)
from drafted import SIZES, Drafted, answer, asked_at_random, opened, requests
from ranks import Layout, Ranks, make
from tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("target"), num_hidden_layers=7)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafters by their methods."""
    folder = tmp_path_factory.mktemp("heads")
    return {
        "eagle3": write_eagle3(folder / "eagle3", draft_vocab_size=GUESSABLE, max_position_embeddings=32),
        "eagle": write_eagle(folder / "eagle"),
    }


@contextmanager
def drafting(target: Path, head: Path, method: str, make: Any = None, **options: Any) -> Iterator[Any]:
    asked = {"method": method} | ({} if method == "mtp" else {"model": str(head)})
    with opened(target, None, make, **{**SIZES, **options}, speculative_config=asked) as engine:
        yield engine


def compare(
    target: Path,
    head: Path,
    method: str,
    spread: tuple[Ranks, Layout] | None = None,
    groups: int = 1,
    **options: Any,
) -> tuple[Drafted, Any]:
    """Answers with the drafter and without are equal; returns what it guessed, and the statistics."""
    asked, layout = requests(Random(1)), Layout() if spread is None else spread[1]
    cut = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.stages}
    executor = None if spread is None or layout.size == 1 else make(*spread, [])
    with opened(target, **{**SIZES, **options}) as engine:
        truth = answer(engine, asked)
    with (
        asked_at_random(Random(2)) as drafted,
        drafting(target, head, method, executor, **options, **cut) as engine,
    ):
        found, stats = answer(engine, asked), engine.stats()
        assert len(engine.ready.worker.windows) >= groups
    for (tokens, logprobs), (expected, wanted) in zip(found, truth, strict=True):
        assert tokens == expected
        if layout.stages == 1:
            assert logprobs == wanted
        for one, other in zip(
            logprobs, wanted, strict=True
        ):  # stages cut prompts otherwise, and torch attends
            assert one.values == pytest.approx(other.values, abs=1e-4)
    return drafted, stats


def assert_published(drafted: Drafted, oracle: Any) -> None:
    assert len(drafted.drafts) > 15
    assert [
        tokens for tokens, guessed in drafted.drafts if guessed != oracle.guesses(tokens, len(guessed))
    ] == []


ALL_KINDS = {"num_gpu_blocks_override": 24}
"""A cache so small that sequences are preempted in every layout."""


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        *(("eagle3", layout) for layout in (Layout(), Layout(2), Layout(1, 2), Layout(1, 4), Layout(2, 2))),
        *(("eagle", layout) for layout in (Layout(), Layout(2), Layout(1, 2))),
    ],
    ids=str,
)
def test_it_guesses_what_is_published(
    method: str, layout: Layout, target: Path, heads: dict[str, Path], ranks: Ranks
) -> None:
    """Behind chunks, shared prefixes, preemptions, and guesses that held or did not; on all ranks alike.

    EAGLE-3 reads streams of layers that one, two or four stages compute.
    """
    drafted, stats = compare(target, heads[method], method, (ranks, layout), **ALL_KINDS)
    assert stats.preemptions and stats.prefix_hits, "the schedule is one of all kinds"
    assert_published(drafted, Oracle.open(target, heads[method]))


def test_entries_come_back_from_disk(target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
    compare(target, heads["eagle"], "eagle", kv_cache_dir=str(tmp_path))
    drafted, stats = compare(target, heads["eagle"], "eagle", kv_cache_dir=str(tmp_path))
    assert stats.disk is not None and stats.disk.read
    assert_published(drafted, Oracle.open(target, heads["eagle"]))


BESIDE = ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"]


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("Glm4MoeForCausalLM", Layout()),
        ("Glm4MoeForCausalLM", Layout(1, 2)),
        ("DeepseekV3ForCausalLM", Layout(2)),
        ("Qwen3_5ForCausalLM", Layout()),
        ("Qwen3_5ForCausalLM", Layout(1, 3)),
        ("Qwen3_5MoeForCausalLM", Layout(2)),
        ("Qwen3NextForCausalLM", Layout()),
    ],
    ids=str,
)
def test_layers_for_mtp(architecture: str, layout: Layout, tmp_path: Path, ranks: Ranks) -> None:
    """They lie in the checkpoint of the served model, behind its last layer or in a scope of their own."""
    write, oracle_class = write_next_token, NextTokenOracle
    if architecture in BESIDE:
        write, oracle_class = write_scoped_next_token, ScopedNextTokenOracle
    target, longer = write(architecture, tmp_path)
    drafted, stats = compare(target, target, "mtp", (ranks, layout), **ALL_KINDS)
    assert stats.preemptions and stats.prefix_hits
    assert_published(drafted, oracle_class.open(longer))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}])
def test_other_number_types(options: dict[str, Any], target: Path, heads: dict[str, Path]) -> None:
    asked = requests(Random(3), temperature=1.1, seed=4)
    with opened(target, **{**SIZES, **options}) as engine:
        truth = answer(engine, asked)
    with asked_at_random(Random(3)), drafting(target, heads["eagle3"], "eagle3", **options) as engine:
        assert answer(engine, asked) == truth
        assert engine.stats().guesses.guessed > 30


def test_a_model_with_windows(heads: dict[str, Path], tmp_path: Path) -> None:
    """The layers of the two lie in groups of the cache, which have tables of their own."""
    windows = {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "num_hidden_layers": 7,
    }
    target = tiny_checkpoint("Qwen3ForCausalLM", tmp_path, **windows)
    sizes: dict[str, Any] = {"max_model_len": 320, "num_gpu_blocks_override": 400}
    drafted, stats = compare(target, heads["eagle"], "eagle", groups=2, **sizes)
    assert stats.prefix_hits
    assert_published(drafted, Oracle.open(target, heads["eagle"]))
