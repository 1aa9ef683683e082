"""Guesses of the drafters that come with the demo model hold about as often as their configs say."""

import json

import pytest
import transformers
from drafted import answer, opened

from engine_core.features.speculation.model_speculator import ModelSpeculator
from engine_core.protocol import AddRequest
from models.checkpoint.hub import DEMO
from worker.protocol import Sampling

COUNTRIES = ("France", "Japan", "Egypt", "Peru", "Norway", "Kenya")
QUESTIONS = [f"What is the capital of {name}?" for name in COUNTRIES]
QUESTIONS += [f"What is {first} plus 7?" for first in range(3, 9)]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_guesses_hold_about_as_often_as_said(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DEMO / "drafts" / method
    said = json.loads((folder / "config.json").read_text())["acceptance"]
    monkeypatch.setattr(ModelSpeculator, "lengths", lambda self, seqs: dict.fromkeys(seqs, said["guesses"]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    asked = [
        AddRequest(
            id, tokenizer.encode(text, add_special_tokens=False), Sampling(max_tokens=40, temperature=0)
        )
        for id, text in enumerate(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True
            )
            for each in QUESTIONS
        )
    ]
    with opened(DEMO, folder, dtype="float32", max_model_len=256, drafting={"method": method}) as engine:
        answer(engine, asked)
        guesses = engine.stats().guesses
    assert guesses is not None and guesses.drafts > 50
    assert 1 + sum(guesses.held) / guesses.drafts == pytest.approx(said["tokens_a_step"], rel=0.35)
