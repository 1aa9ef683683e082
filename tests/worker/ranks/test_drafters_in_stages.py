"""A drafter in the last stage guesses what it guesses behind a whole model, and changes no answer."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
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
from drafted import SIZES, answer, asked_at_random, greedy_by, opened, requests
from ranks import Layout, Ranks, make
from tiny import tiny_checkpoint


class DraftModelOracle:
    """A smaller model, as transformers computes it."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        return greedy_by(self._model, tokens, count)


def write(method: str, folder: Path) -> tuple[Path, dict[str, Any], Any]:
    """A model, the options that name its drafter, and what this guesses by itself."""
    if method == "mtp":
        target, longer = write_next_token("Glm4MoeForCausalLM", folder)
        return target, {"method": "mtp"}, NextTokenOracle.open(longer)
    if method == "mtp of a hybrid":
        target, longer = write_scoped_next_token("Qwen3_5ForCausalLM", folder)
        return target, {"method": "mtp"}, ScopedNextTokenOracle.open(longer)
    target, drafter = folder / "target", folder / "drafter"
    tiny_checkpoint("LlamaForCausalLM", target, num_hidden_layers=7, tie_word_embeddings=method == "eagle")
    if method == "draft_model":
        tiny_checkpoint("LlamaForCausalLM", drafter)
        oracle: Any = DraftModelOracle(drafter)
    elif method == "eagle":
        oracle = Oracle.open(target, write_eagle(drafter))
    else:
        oracle = Oracle.open(target, write_eagle3(drafter, draft_vocab_size=GUESSABLE))
    return target, {"method": method, "model": str(drafter)}, oracle


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("draft_model", Layout(1, 2)),
        ("eagle3", Layout(1, 2)),
        ("eagle3", Layout(1, 4)),
        ("eagle3", Layout(2, 2)),
        ("eagle", Layout(1, 2)),
        ("mtp", Layout(1, 2)),
        ("mtp of a hybrid", Layout(1, 2)),
        ("mtp of a hybrid", Layout(1, 3)),
    ],
    ids=str,
)
def test_it_guesses_what_it_guesses_behind_a_whole_model(
    method: str, layout: Layout, ranks: Ranks, tmp_path: Path
) -> None:
    """Behind chunks, shared prefixes, preemptions, and guesses that held or did not.

    EAGLE-3 reads streams of layers that one, two or four stages compute.
    """
    target, drafting, oracle = write(method, tmp_path)
    sizes = {**SIZES, "num_gpu_blocks_override": 24}
    with opened(target, **sizes) as engine:
        truth = answer(engine, requests(Random(1)))
    cut = {"pipeline_parallel_size": layout.stages, "tensor_parallel_size": layout.tensor}
    with (
        asked_at_random(Random(2)) as drafted,
        opened(target, None, make(ranks, layout, []), **sizes, **cut, speculative_config=drafting) as engine,
    ):
        found, stats = answer(engine, requests(Random(1))), engine.stats()
    for (tokens, logprobs), (expected, wanted) in zip(found, truth, strict=True):
        assert tokens == expected
        for one, other in zip(logprobs, wanted, strict=True):  # prompts are cut otherwise, and torch attends
            assert one.values == pytest.approx(other.values, abs=1e-4)
    assert stats.preemptions and stats.prefix_hits, "the schedule is one of all kinds"
    assert len(drafted.drafts) > 15
    wrong = [tokens for tokens, guesses in drafted.drafts if guesses != oracle.guesses(tokens, len(guesses))]
    assert not wrong
