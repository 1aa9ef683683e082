"""Drafters that read hidden states guess what is published, and change no bit of an answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from draft_heads import (
    GUESSABLE,
    SIZE,
    MedusaOracle,
    NextTokenOracle,
    Oracle,
    ScopedNextTokenOracle,
    write_eagle,
    write_eagle3,
    write_medusa,
    write_next_token,
    write_scoped_next_token,
)
from drafted import MOST, SIZES, Drafted, answer, asked_at_random, opened, requests
from ranks import Layout, Ranks, make
from sizes import engine_config
from tiny import VOCAB_SIZE, tiny_checkpoint

from engine_core.engine import Engine
from models.config import ConfigError


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
    target: Path, head: Path, method: str, make: Any = None, groups: int = 1, **options: Any
) -> tuple[Drafted, Any]:
    """Answers with the drafter and without are equal; returns what it guessed, and the statistics."""
    asked = requests(Random(1))
    with opened(target, **{**SIZES, **options, "tensor_parallel_size": 1}) as engine:
        truth = answer(engine, asked)
    with asked_at_random(Random(2)) as drafted, drafting(target, head, method, make, **options) as engine:
        assert answer(engine, asked) == truth
        assert len(engine.ready.worker.windows) >= groups
        return drafted, engine.stats()


@pytest.mark.turns
@pytest.mark.parametrize("method", ["eagle3", "eagle"])
@pytest.mark.parametrize("ranks_count", [1, 2])
def test_it_guesses_what_is_published(
    method: str, ranks_count: int, target: Path, heads: dict[str, Path], ranks: Ranks
) -> None:
    """Behind chunks, shared prefixes, preemptions, and guesses that held or did not; on all ranks alike."""
    layout = make(ranks, Layout(2), []) if ranks_count == 2 else None
    drafted, stats = compare(target, heads[method], method, layout, tensor_parallel_size=ranks_count)
    assert stats.preemptions and stats.prefix_hits, "the schedule is one of all kinds"
    oracle = Oracle.open(target, heads[method])
    assert len(drafted.drafts) > 40
    wrong = [tokens for tokens, guesses in drafted.drafts if guesses != oracle.guesses(tokens, len(guesses))]
    assert not wrong


def test_entries_come_back_from_disk(target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
    compare(target, heads["eagle"], "eagle", kv_cache_dir=str(tmp_path))
    drafted, stats = compare(target, heads["eagle"], "eagle", kv_cache_dir=str(tmp_path))
    assert stats.disk is not None and stats.disk.read
    oracle = Oracle.open(target, heads["eagle"])
    assert len(drafted.drafts) > 40
    wrong = [tokens for tokens, guesses in drafted.drafts if guesses != oracle.guesses(tokens, len(guesses))]
    assert not wrong


BEHIND = ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"]
BESIDE = ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"]


@pytest.mark.turns(10)
@pytest.mark.parametrize("architecture", [*BEHIND, *BESIDE])
@pytest.mark.parametrize("ranks_count", [1, 2])
def test_layers_for_mtp(architecture: str, ranks_count: int, tmp_path: Path, ranks: Ranks) -> None:
    """They lie in the checkpoint of the served model, behind its last layer or in a scope of their own."""
    write, oracle_class = write_next_token, NextTokenOracle
    if architecture in BESIDE:
        write, oracle_class = write_scoped_next_token, ScopedNextTokenOracle
    target, longer = write(architecture, tmp_path)
    layout = make(ranks, Layout(2), []) if ranks_count == 2 else None
    drafted, stats = compare(target, target, "mtp", layout, tensor_parallel_size=ranks_count)
    assert stats.preemptions and stats.prefix_hits
    oracle = oracle_class.open(longer)
    assert len(drafted.drafts) > 40
    wrong = [tokens for tokens, guesses in drafted.drafts if guesses != oracle.guesses(tokens, len(guesses))]
    assert not wrong


@pytest.mark.turns
@pytest.mark.parametrize("form", [{}, {"converted": True}, {"converted": True, "shared": True}])
@pytest.mark.parametrize("ranks_count", [1, 2])
def test_heads_of_medusa(
    form: dict[str, bool], ranks_count: int, target: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """Each guesses one token from the last hidden state; none has entries in the cache."""
    heads = write_medusa(tmp_path, **form)
    layout = make(ranks, Layout(2), []) if ranks_count == 2 else None
    drafted, _ = compare(target, heads, "medusa", layout, tensor_parallel_size=ranks_count)
    oracle = MedusaOracle.open(target, heads)
    assert len(drafted.drafts) > 40 and max(len(guesses) for _, guesses in drafted.drafts) == MOST
    wrong = [tokens for tokens, guesses in drafted.drafts if guesses != oracle.guesses(tokens, len(guesses))]
    assert not wrong


def test_heads_of_medusa_guess_at_most_one_token_each(target: Path, tmp_path: Path) -> None:
    heads = write_medusa(tmp_path / "three", count=3)
    with drafting(target, heads, "medusa") as engine:
        assert engine.ready.worker.drafts == 3
    asked = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 4}
    with pytest.raises(
        ConfigError, match=r"num_speculative_tokens is 4, and .* has 3 heads, which guess one each"
    ):
        Engine.start(engine_config(target, speculative_config=asked), lambda _: None)


def test_heads_of_medusa_that_do_not_fit_are_refused(
    target: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    wide = write_medusa(tmp_path / "wide", converted=True, hidden_size=SIZE * 2)
    other = write_medusa(tmp_path / "other", converted=True, vocab_size=VOCAB_SIZE + 1)
    layers = write_medusa(tmp_path / "layers", medusa_num_layers=1)
    for folder, said in (
        (
            wide,
            f"made for hidden states of {SIZE * 2} numbers, and those of the model that they would guess for",
        ),
        (other, f"knows {VOCAB_SIZE + 1} tokens"),
        (layers, "weights and config.json do not fit: '?0.1"),
        (heads["eagle"], "has neither medusa_num_heads nor the model_type medusa"),
    ):
        with pytest.raises(ValueError, match=said), drafting(target, folder, "medusa"):
            pass


@pytest.mark.turns
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
    oracle = Oracle.open(target, heads["eagle"])
    assert len(drafted.drafts) > 40
    wrong = [tokens for tokens, guesses in drafted.drafts if guesses != oracle.guesses(tokens, len(guesses))]
    assert not wrong
