"""Tiny random models that hear give the rows and the tokens of transformers, however steps fall."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heard import AUDIO, FAMILIES, Heard
from opened import open_runner
from pictured import (
    Answer,
    Engine,
    Prompt,
    Prompts,
    assert_answers,
    encoded_by_layers,
    expected,
    tower_input,
)
from sounds import noise, tone

from models.config import ConfigError, read_config
from models.loader import LoadOptions, load_model
from models.media.item import MediaError
from models.towers.model import find_tower

OUTPUT = 4
SOUNDS = [tone(0.5), noise(1.37), tone(0.095), noise(30)]


@pytest.fixture(params=FAMILIES)
def heard(request: pytest.FixtureRequest, tmp_path: Path) -> Heard:
    return Heard(request.param, tmp_path)


@torch.inference_mode()
def test_rows_are_those_of_transformers(heard: Heard) -> None:
    tower = find_tower(load_model(LoadOptions(read_config(heard.folder), heard.folder, dtype=torch.float32)))
    assert tower is not None
    processor: Any = Prompts(heard.folder).processor
    sounds = [*SOUNDS, noise(min(61, heard.family.seconds))]
    items = [tower_input(processor.prepare_audio(np.array_split(each, 3))) for each in sounds]
    together = encoded_by_layers(tower, items)
    for item, sound, rows in zip(items, sounds, together, strict=True):
        inputs = heard.inputs([sound])
        ids = torch.tensor([[5, *[AUDIO] * item.embeddings]])
        given = heard.model(
            input_ids=ids, **inputs, output_hidden_states=True, use_cache=False
        ).hidden_states[0]
        torch.testing.assert_close(rows, given[0, 1:], atol=2e-5, rtol=1e-4)


def test_answers_are_those_of_transformers(heard: Heard) -> None:
    prompts = Prompts(heard.folder)
    asked = [
        prompts.make([5, 6], SOUNDS[0], [7]),
        prompts.make([9, 8, 5]),
        prompts.make([5], SOUNDS[1], [9, 6], SOUNDS[0], [8]),
    ]

    def answers(prompted: list[Prompt], chunk: int) -> list[Answer]:
        runner = open_runner(heard.folder, block_size=4, num_gpu_blocks_override=400, max_num_seqs=4)
        assert ("transcription" in runner.facts.tasks) == (heard.name != "qwen2 audio")
        return Engine(runner.launch, runner.facts, prompts, chunk=chunk).run(prompted, OUTPUT)

    right = [expected(heard.model, each, OUTPUT, lambda sounds, ids: heard.inputs(sounds)) for each in asked]
    assert_answers(answers(asked, 512), right)
    together = answers(asked, 5)
    assert_answers(together, right)
    assert answers(asked[:1], 5) == together[:1], "bits depend on what else is in a step"


def test_sounds_that_a_model_does_not_hear_are_refused(heard: Heard) -> None:
    processor: Any = Prompts(heard.folder).processor
    if heard.family.seconds > 30:
        assert processor.seconds == heard.family.seconds
        processor.seconds = 30.0
    with pytest.raises(MediaError, match="30 seconds"):
        processor.prepare_audio([tone(31)])
    if heard.family.least:
        with pytest.raises(MediaError, match=f"{heard.family.least} seconds"):
            processor.prepare_audio([tone(0.01)])
    else:
        fewest = 375 if heard.name == "voxtral" else 7
        assert processor.prepare_audio([tone(0.01)]).embeddings == fewest, "silence is added"


def test_a_model_that_aligns_is_refused_by_name(tmp_path: Path) -> None:
    Heard("qwen3 asr as published", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["thinker_config"] |= {"model_type": "qwen3_forced_aligner", "classify_num": 5000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="aligns texts with sounds"):
        load_model(LoadOptions(read_config(tmp_path), tmp_path, dtype=torch.float32))
