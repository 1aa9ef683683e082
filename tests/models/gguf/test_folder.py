"""The folder that is made for a GGUF file, with the files that other checkpoints have."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gguf_pairs import Pair, Recipe, write_pair
from gguf_writer import F32, Typed
from tiny import EOS_ID, TURN_END_ID, write_tokenizer

from models.config import read_config
from models.fingerprint import digest_weights
from models.gguf.folder import NO_TOKENIZER, gguf_parts, make_folder
from models.plain_files import FileError
from models.pooling.config import read_pooling
from models.quantization.config import describe_quantization

SIZES: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96}
FIELDS: dict[str, object] = {
    "general.file_type": 7,
    "general.sampling.temp": Typed(F32, 0.6),
    "general.sampling.top_k": 20,
    "tokenizer.ggml.eot_token_id": TURN_END_ID,
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def written(folder: Path, arch: str = "LlamaForCausalLM", **recipe: Any) -> Pair:
    return write_pair(folder / "model", arch, Recipe("Q8_0", **{"fields": FIELDS, **recipe}), **SIZES)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_files_are_those_of_other_checkpoints(tmp_path: Path, cache: Path) -> None:
    pair = written(tmp_path)
    folder = make_folder(pair.file, cache)
    config = read_config(folder)
    assert config.architecture == "LlamaForCausalLM" and config.dtype == "bfloat16"
    assert config.eos_token_ids == (EOS_ID, TURN_END_ID)
    assert describe_quantization(config, None) == "gguf, Q8_0"
    assert read(folder / "generation_config.json") == {
        "temperature": 0.6,
        "top_k": 20,
        "eos_token_id": [EOS_ID, TURN_END_ID],
    }
    vocabulary = read(folder / "tokenizer.json")["model"]["vocab"]
    assert vocabulary == read(pair.plain / "tokenizer.json")["model"]["vocab"]
    assert [path.resolve() for path in gguf_parts(folder)] == [pair.file]


def test_a_folder_is_made_once_and_again_when_the_file_has_changed(tmp_path: Path, cache: Path) -> None:
    pair = written(tmp_path)
    first = make_folder(pair.file, cache)
    written_at = (first / "tokenizer.json").stat().st_mtime_ns
    assert make_folder(pair.file, cache) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == written_at
    (first / "config.json").unlink()  # as whoever clears caches may leave it
    assert (make_folder(pair.file, cache) / "config.json").is_file()
    os.utime(pair.file, ns=(1, 1))
    assert make_folder(pair.file, cache) != first
    assert {path.name for path in cache.iterdir()} == {first.name, make_folder(pair.file, cache).name}


def test_all_parts_are_there_under_their_names(tmp_path: Path, cache: Path) -> None:
    pair = written(tmp_path, parts=2)
    names = [path.name for path in gguf_parts(make_folder(pair.file, cache))]
    assert names == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]


def test_other_folders_hold_no_parts(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert gguf_parts(tmp_path) == []


def test_files_beside_it_win(tmp_path: Path, cache: Path) -> None:
    pair = written(tmp_path)
    beside = pair.file.parent
    config = read(pair.plain / "config.json") | {"rope_theta": 77.0, "quantization_config": {"bits": 4}}
    (beside / "config.json").write_text(json.dumps(config))
    (beside / "generation_config.json").write_text('{"top_k": 3}')
    write_tokenizer(beside)
    template = read(beside / "tokenizer_config.json") | {"chat_template": "mine"}
    (beside / "tokenizer_config.json").write_text(json.dumps(template))
    folder = make_folder(pair.file, cache)
    assert read_config(folder).raw["rope_theta"] == 77.0
    assert describe_quantization(read_config(folder), None) == "gguf, Q8_0"
    assert read(folder / "tokenizer_config.json")["chat_template"] == "mine"
    assert read(folder / "generation_config.json") == {"top_k": 3}


def test_a_config_that_says_only_its_type_does_not_win(tmp_path: Path, cache: Path) -> None:
    pair = written(tmp_path)
    (pair.file.parent / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(make_folder(pair.file, cache)).hidden_size == 64


def test_the_config_of_another_folder_wins_over_all(tmp_path: Path, cache: Path) -> None:
    pair = written(tmp_path)
    (tmp_path / "other").mkdir()
    config = read(pair.plain / "config.json") | {"rope_theta": 55.0}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert read_config(make_folder(pair.file, cache, tmp_path / "other")).raw["rope_theta"] == 55.0
    with pytest.raises(FileError, match=r"nothing/config\.json cannot be read: No such file"):
        make_folder(pair.file, cache, tmp_path / "nothing")


def test_a_tokenizer_that_is_not_known_leaves_the_reason(tmp_path: Path, cache: Path) -> None:
    pair = written(tmp_path, fields={"tokenizer.ggml.pre": "newest"})
    folder = make_folder(pair.file, cache)
    assert not (folder / "tokenizer.json").exists()
    assert "tokenizer.ggml.pre is 'newest'" in (folder / NO_TOKENIZER).read_text()


@pytest.mark.parametrize(("number", "mode"), [(1, "MEAN"), (2, "CLS"), (3, "LAST")])
def test_ways_to_pool(number: int, mode: str, tmp_path: Path, cache: Path) -> None:
    pair = written(tmp_path, "BertModel", fields={"bert.pooling_type": number})
    folder = make_folder(pair.file, cache)
    pooling = read_pooling(folder, read_config(folder), {})
    assert (pooling.modes, pooling.normalize) == ((mode,), True)


def test_the_digest_of_weights_is_that_of_the_file(tmp_path: Path, cache: Path) -> None:
    pair = written(tmp_path)
    before = digest_weights(make_folder(pair.file, cache), "auto", 0)
    data = bytearray(pair.file.read_bytes())
    data[-64:] = bytes(64)
    pair.file.write_bytes(data)
    assert digest_weights(make_folder(pair.file, cache), "auto", 0) != before


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pair = written(tmp_path)
    with pytest.raises(FileError, match=r"missing cannot be written .* let XDG_CACHE_HOME name"):
        make_folder(pair.file, tmp_path / "missing")
