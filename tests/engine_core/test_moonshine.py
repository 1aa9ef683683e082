"""Moonshine in a whole engine: the logits of transformers for sounds of any length, however steps fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sounds import noise
from sourced import Found, answer_all
from tiny_moonshine import START, make

from engine_core.protocol import Add, Source
from models.config import ConfigError
from models.media.moonshine import MOST_SAMPLES, positions_of, samples_of
from worker.buffers import Buffer
from worker.protocol import Sampling

OUTPUT = 8
SOUNDS = [noise(1.0), noise(2.345), noise(0.06), noise(30.0)]
PROMPTS = [[START], [START, 40, 50], [START, *range(60, 90)], [START]]


@pytest.fixture(scope="module")
def moonshine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("moonshine")
    return folder, make(folder)


def asked(id: int, **changes: Any) -> Add:
    sound = SOUNDS[id % len(SOUNDS)]
    source = Source(f"{id % len(SOUNDS)}", positions_of(len(sound)), features=Buffer(sound.tobytes()))
    params = Sampling(max_tokens=OUTPUT, temperature=0, logprobs=0)
    prompt = PROMPTS[id // 2 % len(PROMPTS)]
    return Add(id=id, tokens=prompt, params=params, **{"source": source, **changes})


@torch.inference_mode()
def check(model: Any, requests: list[Add], found: Found) -> None:
    """Assert that tokens are the likeliest of transformers' model, and logprobs its own."""
    for each in requests:
        tokens, logprobs = found[each.id]
        sound = torch.from_numpy(SOUNDS[each.id % len(SOUNDS)])[None]
        logits = model(sound, decoder_input_ids=torch.tensor([each.tokens + tokens])).logits[0]
        theirs = logits[len(each.tokens) - 1 : -1].log_softmax(-1)
        assert theirs.argmax(-1).tolist() == tokens
        wanted = theirs.gather(1, torch.tensor(tokens).unsqueeze(1)).flatten().tolist()
        assert logprobs == pytest.approx(wanted, abs=1e-4)


def test_logits_are_those_of_transformers_and_steps_change_no_bit(moonshine: tuple[Path, Any]) -> None:
    folder, model = moonshine
    requests = [asked(id) for id in range(8)]
    found, engine = answer_all(folder, requests)
    check(model, requests, found)
    assert engine.stats().media_encoded == len(SOUNDS)
    options: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 7, "max_num_seqs": 7, "steps_ahead": 0},
        {"num_gpu_blocks_override": 8, "scheduling_policy": "priority"},
    ]
    for each in options:
        again = [asked(id, priority=-id) for id in range(8)]
        assert answer_all(folder, again, 1, **each)[0] == found
    assert answer_all(folder, [requests[3]])[0][3] == found[3], "bits depend on what else is in a step"


def test_positions_are_those_that_convolutions_give(moonshine: tuple[Path, Any]) -> None:
    _, model = moonshine
    for samples in (samples_of(1), 16_000, 16_383, MOST_SAMPLES):
        rows = model.model.encoder(torch.zeros(1, samples)).last_hidden_state
        assert positions_of(samples) == rows.shape[1]
    assert positions_of(5) == 1, "silence is added"


@pytest.mark.parametrize(
    "features", [None, Buffer(b""), Buffer(np.zeros(MOST_SAMPLES + 1, np.float32).tobytes()), Buffer(b"abc")]
)
def test_sources_that_are_no_samples_are_refused(
    moonshine: tuple[Path, Any], features: Buffer | None
) -> None:
    source = Source("x", 5, features=features)
    good = asked(0)
    found, _ = answer_all(moonshine[0], [good])
    with pytest.raises(AssertionError, match="samples, float32"):
        answer_all(moonshine[0], [asked(1, source=source)])
    assert found[0][0]


def test_heads_that_are_shared_are_refused(tmp_path: Path) -> None:
    make(
        tmp_path, decoder_num_key_value_heads=1, decoder_num_attention_heads=2, encoder_num_key_value_heads=1
    )
    with pytest.raises(ConfigError, match="as many heads of keys"):
        answer_all(tmp_path, [asked(0)])
