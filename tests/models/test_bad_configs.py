"""Configs that lie, and files of settings that are none: a line names the file, the field and the reason."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from broken import Case, assert_refused, case, config, put, replaced
from shape_files import read_shapes
from tiny import VOCAB_SIZE

from models.config import read_config
from models.loader import LoadOptions, load_model

CONFIG, DEFAULTS, MODULES = "config.json", "generation_config.json", "modules.json"
DEEP = '{"a":' * 100_000

FIELDS: list[Case] = [
    *(
        case(name, config(**each["config"]), *each["told"])
        for name, each in read_shapes("wrong_configs").items()
    ),
    case("long nonsense", config(eos_token_id=["x" * 10_000]), CONFIG, "'eos_token_id' is ["),
]

CONFIG_FILES: list[Case] = [
    case("gone", put(None, CONFIG), CONFIG, "does not exist"),
    case("empty", put("", CONFIG), CONFIG, "cannot be read as JSON"),
    case("not JSON", put("{'a': 1}", CONFIG), CONFIG, "cannot be read as JSON"),
    case("a list", put("[]", CONFIG), CONFIG, "must hold a JSON object, but holds list"),
    case("no text", put(b"\xff\xfe{}", CONFIG), CONFIG, "cannot be read as JSON"),
    case("nested", put(DEEP, CONFIG), CONFIG, "nested too deeply"),
    case(
        "nested by 100",
        config(extra=json.loads("[" * 100 + "]" * 100)),
        CONFIG,
        "'extra' is nested too deeply",
    ),
    case(
        "a number of 5000 digits", put('{"vocab_size": ' + "9" * 5000 + "}", CONFIG), CONFIG, "cannot be read"
    ),
    case("a pipe", replaced(os.mkfifo, CONFIG), CONFIG, "is a pipe (FIFO)"),
    case("a folder", replaced(Path.mkdir, CONFIG), CONFIG, "is a folder"),
    case("defaults that are not JSON", put("{", DEFAULTS), DEFAULTS, "cannot be read as JSON"),
    case("defaults that are a pipe", replaced(os.mkfifo, DEFAULTS), DEFAULTS, "is a pipe"),
    case("modules that are not JSON", put("[", MODULES), MODULES),
    case(
        "modules that are nested",
        put('[{"type":"a","x":' + "[" * 100_000, MODULES),
        MODULES,
        "nested too deeply",
    ),
    case(
        "modules elsewhere",
        put(json.dumps([{"type": "sentence_transformers.models.Pooling", "path": "../x"}]), MODULES),
        MODULES,
        "'../x' is outside",
    ),
    case("modules that are a pipe", replaced(os.mkfifo, MODULES), MODULES, "is a pipe"),
]


@pytest.mark.parametrize("broken", [*FIELDS, *CONFIG_FILES], ids=lambda each: each.name)
def test_what_lies_is_refused(broken: Case, folder: Path) -> None:
    assert_refused(broken, folder)


@pytest.mark.parametrize("strange", [VOCAB_SIZE, -1, 10**20])
def test_an_end_beyond_the_vocabulary_is_left_out_with_a_warning(
    folder: Path, strange: int, caplog: pytest.LogCaptureFixture
) -> None:
    config(eos_token_id=[1, strange])(folder)
    found = read_config(folder)
    assert strange not in found.eos_token_ids
    assert 1 in found.eos_token_ids
    with caplog.at_level(logging.WARNING, "models"):
        load_model(LoadOptions(found, folder, dtype=torch.float32))
    (warning,) = caplog.messages
    assert f"{CONFIG}: 'eos_token_id' {strange} is none of the model's {VOCAB_SIZE} tokens" in warning
    assert "nothing but max_tokens" not in warning


def test_without_any_end_the_warning_says_what_ends_texts(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    config(eos_token_id=VOCAB_SIZE)(folder)
    found = read_config(folder)
    assert found.eos_token_ids == ()
    assert found.warnings[0].endswith("left out: nothing but max_tokens and stop strings ends a text")
