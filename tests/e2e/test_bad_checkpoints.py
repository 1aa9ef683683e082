"""A checkpoint that cannot work never becomes ready: exit code 2, and a last line that says why."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import (
    EMBEDDINGS,
    GATE,
    NORM,
    WEIGHTS,
    Break,
    Case,
    case,
    config,
    cut,
    replaced,
    tensor,
    with_number,
)
from live import refusal
from packed import Recipe, change_config, config_of, write_pair
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from torch import Tensor

BROKEN = [
    case("a NaN", with_number(GATE, float("nan")), WEIGHTS, GATE, "1 of 1536 numbers"),
    case("no JSON", lambda folder: (folder / "config.json").write_text("{not json"), "config.json"),
    case("half of a file", cut(lambda size: size // 2), WEIGHTS, "lies up to byte"),
    case("a pipe", replaced(os.mkfifo), WEIGHTS, "is a pipe"),
    case("layers that are not there", config(num_hidden_layers=10**9), "config.json", "'num_hidden_layers'"),
    case("another width", config(hidden_size=64), EMBEDDINGS, "[320, 32], not [320, 64]", "more"),
    case("overflow", tensor(NORM, lambda old: torch.full_like(old, 3e38)), "at warm-up", "non-finite"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


# Quantized ones.

RECIPE = Recipe(method="gptq", group=32)
DOWN = "model.layers.1.mlp.down_proj"


def configured(**fields: object) -> Break:
    return lambda folder: change_config(folder, quantization_config=config_of(RECIPE) | fields)


def packed_tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Break:
    def run(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        changed = change(tensors.pop(f"{DOWN}.{name}"))
        save_file(
            tensors if changed is None else {**tensors, f"{DOWN}.{name}": changed}, path, {"format": "pt"}
        )

    return run


def in_text_config(folder: Path) -> None:
    change_config(folder, quantization_config=None, text_config={"quantization_config": {"bits": 3}})


QUANTIZED = [
    case("another group", configured(group_size=16), "config.json (gptq, 4 bits, groups of 16)", "take both"),
    case(
        "no zero points",
        packed_tensor("qzeros", lambda x: None),
        *(f"{DOWN}.qzeros is missing", "take both from one"),
    ),
    case(
        "swapped",
        packed_tensor("qweight", lambda x: x.t().contiguous()),
        *(f"{DOWN}.qweight", "has the shape"),
    ),
    case("three bits", configured(bits=3), "config.json: quantization_config", "'bits' is 3", "use another"),
    case(
        "NaN",
        packed_tensor("scales", lambda x: x * torch.nan),
        *("model.safetensors", f"{DOWN}.scales", "NaN", "download it again, or use another"),
    ),
    case(
        "a pattern that explodes",
        configured(dynamic={"(a+)+$": {}}),
        *(
            "config.json: quantization_config",
            "'dynamic'",
            "'(a+)+$' is not used",
            "name the modules in full",
        ),
    ),
    case("in text_config", in_text_config, "quantization_config", "'bits' is 3", "use another"),
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
    return write_pair(tmp_path_factory.mktemp("pair"), RECIPE, **shape).packed


CASES = [*(("llama", each) for each in BROKEN), *(("packed", each) for each in QUANTIZED)]


@pytest.mark.turns(28)
@pytest.mark.parametrize(("source", "broken"), CASES, ids=lambda each: getattr(each, "name", each))
def test_it_is_refused_with_one_line(
    source: str, broken: Case, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = shutil.copytree(request.getfixturevalue(source), tmp_path / "model")
    broken.breaks(folder)
    line = refusal(str(folder), "--kv-cache-memory-bytes", "16M")
    assert len(line) <= 220
    assert [text for text in broken.told if text not in line] == [], line
