"""Models that find entities give the logits of GLiNER's formulas, in whatever company."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from entities import entity_checkpoint
from pooled import Params, load_pooled, pool

from models.config import ConfigError, read_config
from models.pooling.converted_checkpoints import find_or_make

IDS = [0, 320, 30, 31, 320, 40, 321, 50, 51, 52, 53, 54, 55, 56, 57]
WORDS = [[7], [8, 9, 10], [11], [12, 13], [14]]
SHORT = [*IDS[:7], 60, 61, 62]


@dataclass(frozen=True)
class Entities(Params):
    labels: int = 0


def asked(labels: list[int], words: list[list[int]]) -> Entities:
    spans = [*((at, at + 1) for at in labels), *((word[0], word[-1] + 1) for word in words)]
    return Entities("ner", spans=tuple(spans), labels=len(labels))


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(
    ("mode", "layers", "merge"),
    [("markerV0", 1, "first"), ("token_level", 1, "max"), ("marker", 0, "last"), ("markerV0", 2, "mean")],
)
def test_logits(mode: str, layers: int, merge: str, tmp_path: Path) -> None:
    formulas = entity_checkpoint(tmp_path / "it", mode=mode, layers=layers, subtoken_pooling=merge)
    model = load_pooled(find_or_make(tmp_path / "it", lambda name, folder: tmp_path))
    assert model[0].pooler.tasks == {"ner"}
    texts: list[Any] = [IDS, SHORT, IDS, IDS]
    spans: list[Any] = [([1, 4], WORDS), ([4], [[7], [8, 9]]), ([2, 5], WORDS[:1]), ([1], WORDS)]
    found = pool(model, texts, [asked(*each) for each in spans])
    for text, (labels, words), own in zip(texts, spans, found, strict=True):
        expected = formulas(text, labels, words, merge)
        torch.testing.assert_close(own.flatten(), expected.flatten(), atol=1e-4, rtol=1e-4)
        assert torch.equal(pool(model, [text], asked(labels, words))[0], own)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels_encoder", "bert"),
        ("span_mode", "conv_max"),
        ("words_splitter_type", "spacy"),
        ("encoder_config", None),
    ],
)
def test_what_is_not_served_is_named(field: str, value: Any, tmp_path: Path) -> None:
    fields: Any = {field: value}
    entity_checkpoint(tmp_path / "it", **fields)
    with pytest.raises(ConfigError, match=field if field != "span_mode" else "conv_max"):
        find_or_make(tmp_path / "it", lambda name, folder: tmp_path)


def test_distances_reach_as_far_as_the_encoder_learned(tmp_path: Path) -> None:
    entity_checkpoint(tmp_path / "it")
    made = find_or_make(tmp_path / "it", lambda name, folder: tmp_path)
    raw = json.loads((made / "config.json").read_text())
    assert (raw["max_relative_positions"], read_config(made).max_len) == (64, 80)
