"""Where the defaults of sampling come from, and what is said of that."""

import json
from pathlib import Path

import pytest

from server.request_limits import LIMITS
from server.requests.generation_config import GenerationConfigError, SamplingDefaults, read_defaults

WHOLE = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 8, "do_sample": True, "eos_token_id": [1]}
SMOLLM2 = "HuggingFaceTB/SmolLM2-360M-Instruct"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "model", WHOLE)


def written(folder: Path, content: object) -> Path:
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def read(folder: Path, source: str = "auto", model: str = "m", **overrides: object) -> SamplingDefaults:
    return read_defaults(folder, model, source, overrides)


def test_the_checkpoint_and_then_the_operator_say(folder: Path, tmp_path: Path) -> None:
    assert read(folder).values == {"temperature": 0.6, "top_k": 20, "max_tokens": 8}
    assert read(folder, temperature=0).values == {"temperature": 0, "top_k": 20, "max_tokens": 8}
    assert read(folder, "vllm").values == {}
    assert read(folder, "vllm", min_p=0.1).values == {"min_p": 0.1}
    assert read(tmp_path / "none").values == {}
    assert read(tmp_path / "none", str(folder)).values["top_k"] == 20


def test_the_operators_max_new_tokens_bounds_every_answer(folder: Path, tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert read(folder).limits == read(none, "vllm", temperature=1).limits == LIMITS
    assert read(folder, max_new_tokens=5).limits.new_tokens == 5
    assert read(none, "vllm", max_new_tokens=5).limits.new_tokens == 5
    assert read(none, str(folder)).limits.new_tokens == 8
    assert read(none, str(folder), max_new_tokens=5).limits.new_tokens == 5


def test_what_authors_advise_counts_where_the_checkpoint_says_nothing(folder: Path, tmp_path: Path) -> None:
    silent = written(tmp_path / "silent", {"eos_token_id": 2, "max_new_tokens": 9})
    advised = {"temperature": 0.2, "top_p": 0.9}
    assert read(tmp_path / "none", model="smollm2").values == advised
    assert read(silent, model=SMOLLM2).values == advised | {"max_tokens": 9}
    assert read(tmp_path / "none", model=SMOLLM2, top_p=0.5).values == advised | {"top_p": 0.5}
    assert read(folder, model=SMOLLM2).values == read(folder).values
    assert read(silent, "vllm", SMOLLM2).values == {}


def test_what_is_said_of_them(folder: Path, tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert str(read(folder)) == "temperature 0.6, top_p 1, top_k 20, max_tokens 8, the model's own"
    assert str(read(none)) == "temperature 1, top_p 1, the neutral ones, for the model names none"
    assert str(read(none, model="smollm2")) == "temperature 0.2, top_p 0.9, as the model's authors advise"
    assert str(read(folder, "vllm", min_p=0.1)).endswith(
        ", min_p 0.1, of --generation-config vllm, with --override-generation-config"
    )


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(GenerationConfigError, match="there is no"):
        read(folder, str(tmp_path))
    with pytest.raises(GenerationConfigError, match="top_p must be a number"):
        read(folder, top_p="x")
    for number in (0, -1):
        with pytest.raises(GenerationConfigError, match="max_new_tokens must be at least 1"):
            read(folder, max_new_tokens=number)
