"""Checkpoints whose numbers or fields lie: a line names the file, the field or tensor, and the reason.

Configs are in test_bad_configs.py, files that are no such files in checkpoint/test_bad_files.py, tokenizers
in tests/server/text/test_bad_tokenizers.py.
"""

import logging
from pathlib import Path

import pytest
import torch
from broken import (
    EMBEDDINGS,
    GATE,
    NORM,
    WEIGHTS,
    Case,
    assert_refused,
    case,
    config,
    refusal,
    tensor,
    tensors,
    with_number,
)
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from models.config import read_config
from models.loader import LoadOptions, load_model

NAN, INFINITE = float("nan"), float("inf")
CONFIG = "config.json"
UNFIT = ("weights and config.json do not fit",)

NUMBERS: list[Case] = [
    case(
        "all NaN", tensor(GATE, lambda old: torch.full_like(old, NAN)), WEIGHTS, GATE, "1536 of 1536 numbers"
    ),
    case("one NaN", with_number(GATE, NAN), WEIGHTS, GATE, "1 of 1536 numbers that are NaN or infinite"),
    case("one infinite", with_number(GATE, INFINITE), WEIGHTS, GATE, "1 of 1536 numbers"),
    case("minus infinite", with_number(GATE, -INFINITE), WEIGHTS, GATE, "1 of 1536 numbers"),
    case("NaN in a norm", with_number(NORM, NAN), WEIGHTS, NORM, "1 of 32 numbers"),
    case("NaN in embeddings", with_number(EMBEDDINGS, NAN), WEIGHTS, EMBEDDINGS, "1 of 10240 numbers"),
    case("NaN in bfloat16", with_number(GATE, NAN, torch.bfloat16), WEIGHTS, GATE, "1 of 1536 numbers"),
    case("NaN in float16", with_number(GATE, NAN, torch.float16), WEIGHTS, GATE, "1 of 1536 numbers"),
]

TYPES: list[Case] = [
    case(name, tensor(GATE, lambda old, dtype=dtype: old.to(dtype)), GATE, name, *UNFIT)
    for name, dtype in {
        "BOOL": torch.bool,
        "int8": torch.int8,
        "uint8": torch.uint8,
        "int64": torch.int64,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "float64": torch.float64,
        "C64": torch.complex64,
    }.items()
]

SHAPES: list[Case] = [
    case("one is missing", tensors(lambda held: held.pop(GATE)), f"{GATE} is missing in {WEIGHTS}", *UNFIT),
    case("one too many", tensors(lambda held: held.update(x=torch.zeros(1))), "x in", "has no place", *UNFIT),
    case(
        "narrower",
        tensor(GATE, lambda old: old[:, :16]),
        GATE,
        "has the shape [48, 16], not [48, 32]",
        *UNFIT,
    ),
    case("turned", tensor(GATE, lambda old: old.t()), GATE, "has the shape [32, 48], not [48, 32]", *UNFIT),
    case("three dimensions", tensor(GATE, lambda old: old[None]), GATE, "has the shape [1, 48, 32]", *UNFIT),
    case("none", tensor(GATE, lambda old: old[0, 0]), GATE, "has the shape [], not", *UNFIT),
    case("no rows", tensor(GATE, lambda old: old[:0]), GATE, "has the shape [0, 32], not", *UNFIT),
    case(
        "all are missing",
        tensors(lambda held: [held.pop(name) for name in list(held) if "norm" not in name]),
        "embed_tokens.weight is missing",
        "more",
        *UNFIT,
    ),
    case(
        "under other names",
        tensors(lambda held: [held.update({f"x{'y' * 500}{name}": held.pop(name)}) for name in list(held)]),
        "is missing",
        "more",
        *UNFIT,
    ),
]


@pytest.mark.parametrize("broken", [*NUMBERS, *TYPES, *SHAPES], ids=lambda each: each.name)
def test_what_lies_is_refused(broken: Case, folder: Path) -> None:
    assert_refused(broken, folder)


def test_nothing_is_read_of_weights_that_do_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []
    config(num_hidden_layers=4)(folder)
    with pytest.raises(ValueError, match="is missing"):
        load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32, report=read.append))
    assert read == []


def test_all_that_is_wrong_is_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors(lambda held: [held.pop(name) for name in list(held) if "mlp" in name])(folder)
    with caplog.at_level(logging.DEBUG, "models"):
        line = refusal(folder)
    assert line.endswith("; and 7 more"), line
    assert sum("is missing" in message for message in caplog.messages) == 9


def test_numbers_that_the_type_cannot_hold(folder: Path) -> None:
    with_number(GATE, 1e6)(folder)
    line = refusal(folder, dtype=torch.float16)
    assert line == (
        f"error: {WEIGHTS}: {GATE} has numbers up to 1e+06, which float16 cannot hold: choose another --dtype"
    )


def test_numbers_whose_sum_is_too_large_are_no_error(folder: Path) -> None:
    tensor(NORM, lambda old: torch.full_like(old, 3e38))(folder)
    load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32))


def test_the_first_layers_of_albert_are_all_its_layers(tmp_path: Path) -> None:
    """It has fewer tensors than layers, because they share them."""
    folder = tiny_checkpoint("AlbertModel", tmp_path)
    config(num_hidden_layers=200)(folder)
    with pytest.raises(AssertionError, match="was loaded"):
        refusal(folder)


def test_a_model_on_the_code_of_transformers_is_checked_as_its_tensors_are_read(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Jais2ForCausalLM", tmp_path)
    held = load_file(folder / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    held[name][3, 3] = NAN
    save_file(held, folder / WEIGHTS)
    assert f"{WEIGHTS}: {name} has 1 of" in refusal(folder)
    save_file({**held, name: held[name].to(torch.int8)}, folder / WEIGHTS)
    assert f"{name} in {WEIGHTS} holds numbers of the type int8" in refusal(folder)
