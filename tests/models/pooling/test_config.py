"""What `--pooler-config` asks for, and the widths and the encoding of a pooling config."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pooling_files import put_modules, read

from models.config import ConfigError
from models.pooling.config import PoolingConfig


def test_the_operator_has_the_last_word(tmp_path: Path) -> None:
    put_modules(tmp_path, ("Transformer", None), ("Pooling", {"pooling_mode": "mean"}), ("Normalize", None))
    config = read(tmp_path, {"pooling_type": "CLS", "use_activation": False, "dimensions": 8})
    assert config.modes == ("CLS",)
    assert config.use_activation is False
    assert config.dimensions == 8


@pytest.mark.parametrize(
    ("asked", "modes", "tokens"),
    [
        ({"pooling_type": "last"}, ("LAST",), None),
        ({"pooling_type": "ALL"}, (), "ALL"),
        ({"pooling_type": "STEP", "step_tag_id": 3}, (), "STEP"),
        ({"seq_pooling_type": "MEAN", "tok_pooling_type": "STEP", "step_tag_id": 3}, ("MEAN",), "STEP"),
    ],
)
def test_pooling_types(
    tmp_path: Path, asked: dict[str, object], modes: tuple[str, ...], tokens: str | None
) -> None:
    config = read(tmp_path, asked)
    assert (config.modes, config.tokens) == (modes, tokens)


@pytest.mark.parametrize("name", ["use_activation", "normalize", "softmax", "activation"])
def test_older_words_for_the_activation(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, {name: False}).use_activation is False


def test_calibration(tmp_path: Path) -> None:
    config = read(tmp_path, {"logit_mean": 2.65, "logit_sigma": 0.5})
    assert (config.logit_mean, config.logit_sigma) == (2.65, 0.5)
    assert read(tmp_path, {"logit_bias": 1.5}).logit_mean == 1.5
    assert (read(tmp_path).logit_mean, read(tmp_path).logit_sigma) == (0.0, 1.0)


@pytest.mark.parametrize(("name", "task"), [("score", "classify"), ("encode", None), ("embed", "embed")])
def test_tasks_by_their_older_names(tmp_path: Path, name: str, task: str | None) -> None:
    assert read(tmp_path, {"task": name}).task == task


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"poling_type": "CLS"}, "unknown field `poling_type`; its fields are task, pooling_type"),
        ({"pooling_type": "MEDIAN"}, "no pooling MEDIAN; there are CLS, LAST, MEAN"),
        ({"tok_pooling_type": "MEAN"}, "must be ALL or STEP"),
        ({"pooling_type": "CLS", "seq_pooling_type": "CLS"}, "set pooling_type, or seq_pooling_type"),
        ({"logit_sigma": 0}, "division by zero"),
        ({"dimensions": 0}, "at least 1"),
        ({"dimensions": "many"}, "dimensions"),
        ({"enable_chunked_processing": True, "max_embed_len": 99}, "in pieces.* are not supported"),
        ({"max_embed_len": 99}, "in pieces.* are not supported"),
        ({"task": "plugin"}, "no task 'plugin'; there are embed"),
    ],
)
def test_what_cannot_be_asked(tmp_path: Path, asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, asked)


def test_matryoshka(tmp_path: Path) -> None:
    assert not read(tmp_path).matryoshka
    assert read(tmp_path, is_matryoshka=True).matryoshka
    assert read(tmp_path, matryoshka_dimensions=[8, 16]).matryoshka_dimensions == (8, 16)


def test_it_survives_the_wire(tmp_path: Path) -> None:
    put_modules(
        tmp_path, ("Transformer", None), ("Pooling", {}), ("Dense", {"in_features": 2, "out_features": 2})
    )
    config = read(tmp_path)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=PoolingConfig) == config
