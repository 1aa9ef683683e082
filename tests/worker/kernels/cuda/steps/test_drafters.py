"""Drafters beside replayed steps: answers are the CPU's, and so are the guesses."""

from pathlib import Path
from random import Random

import pytest
from draft_heads import GUESSABLE, write_eagle, write_eagle3, write_next_token
from drafted import SIZES, Drafted, answer, asked_at_random, opened, requests
from interpreted_device import ON_A_CARD, Interpreted
from msgspec.structs import replace
from tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(ON_A_CARD, reason="on a card, workers use its kernels anyway")
TOKENS = 16
ASKED = [
    replace(add, params=replace(add.params, max_tokens=9, logprobs=1 if add.id == 0 else None))
    for add in requests(Random(1))[:3]
]
"""Some whose tokens are chosen in graphs, and one whose tokens are not."""


def answers(target: Path, method: str, head: Path) -> tuple[list[list[int]], Drafted]:
    """The tokens of all answers, and what was guessed for them."""
    asked = {"method": method} | ({} if method == "mtp" else {"model": str(head)})
    with (
        asked_at_random(Random(2)) as drafted,
        opened(target, None, **SIZES, speculative_config=asked) as engine,
    ):
        while engine.prepare(wait=True):
            pass
        return [tokens for tokens, _ in answer(engine, ASKED)], drafted


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "eagle", "mtp"])
def test_answers_and_guesses_are_those_of_the_cpu(
    method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Through chunks, shared prefixes and preemptions, and behind guesses that hold or do not."""
    target = head = tmp_path / "target"
    if method == "mtp":
        target, _ = write_next_token("DeepseekV3ForCausalLM", tmp_path)
    else:
        tiny_checkpoint("LlamaForCausalLM", target, num_hidden_layers=7 if method == "eagle3" else 2)
        head = {
            "draft_model": lambda at: tiny_checkpoint("Qwen3ForCausalLM", at, num_hidden_layers=1),
            "eagle3": lambda at: write_eagle3(at, draft_vocab_size=GUESSABLE, max_position_embeddings=32),
            "eagle": write_eagle,
        }[method](tmp_path / "head")
    expected, guessed = answers(target, method, head)
    device: Interpreted = request.getfixturevalue("device")
    device.most_tokens = TOKENS
    found, drafted = answers(target, method, head)
    assert found == expected
    assert drafted.drafts == guessed.drafts and len(guessed.drafts) > 3
    assert len(device.graphs.captured) == 3
    assert {*device.graphs.replayed} == {*range(3)}, "passes and steps of both kinds were replayed"
