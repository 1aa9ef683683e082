"""Samples of an index: files of any length, and what clients of databases give."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from server.options.option_table import OptionError
from server.terminal.index_samples import READ, choose, read_file
from server.terminal.index_stores import points_of_qdrant, store_of


def lines(path: Path, count: int, numbers: int = 3) -> Path:
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"id": i, "text": f"text {i}", "embedding": [i] + [0.5] * numbers}) + "\n")
    return path


def test_json_lines(tmp_path: Path) -> None:
    short = read_file(lines(tmp_path / "short.jsonl", 5), None, None, None)
    assert short[4] == ("text 4", [4, 0.5, 0.5, 0.5])
    long = read_file(lines(tmp_path / "long.jsonl", 12_000, 200), None, None, None)
    assert len(long) == READ and long[0][0] == "text 0" and long[-1][0] > "text 11900"
    assert len({text for text, _ in long}) == READ
    nested = tmp_path / "nested.jsonl"
    nested.write_text(json.dumps({"payload": {"words": "a"}, "v": [1.0]}) + "\n\n")
    assert read_file(nested, None, "payload.words", "v") == [("a", [1.0])]


def test_a_matrix_of_millions_of_rows_is_not_read(tmp_path: Path) -> None:
    rows = 2_000_000
    path, texts = tmp_path / "v.npy", tmp_path / "t.txt"
    matrix = np.lib.format.open_memmap(path, "w+", np.float32, (rows, 4))  # a file with a hole
    matrix[-READ:] = 1
    del matrix
    texts.write_bytes(b"a\n" * rows)
    found = read_file(path, texts, None, None)
    assert len(found) == READ and found[0][0] == "a"
    texts.write_bytes(b"a\n" * 9)
    with pytest.raises(OptionError, match="has fewer lines than"):
        read_file(path, texts, None, None)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.jsonl", b"[1]", "is no object"),
        ("a.jsonl", b'{"word": "a", "vector": [1]}', "Name it by --text-field; there are word, vector"),
        ("a.npy", b"x", "--texts"),
        ("a.csv", b"x", "should be .jsonl"),
        ("missing.jsonl", None, "No such file"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=said):
        read_file(tmp_path / name, None, None, None)


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "t.txt").write_text("a\n")
    with pytest.raises(OptionError, match="no matrix of numbers"):
        read_file(tmp_path / "a.npy", tmp_path / "t.txt", None, None)


def test_long_texts_are_chosen() -> None:
    samples = [("x" * length, None) for length in range(1, 257)]
    chosen = [len(text) for text, _ in choose(samples, 32)]
    assert len(chosen) == 32 and chosen[-8:] == list(range(249, 257)) and chosen[0] == 1
    assert choose(samples[:5], 32) == samples[:5]


def test_databases() -> None:
    points = [SimpleNamespace(vector={"dense": [1.0]}, payload={"text": "a"})]
    assert points_of_qdrant(points, None, "dense") == [("a", [1.0])]
    points = [SimpleNamespace(vector=[2.0], payload={"page": {"content": "b"}})]
    assert points_of_qdrant(points, "page.content", None) == [("b", [2.0])]
    assert store_of("file.jsonl") is None
    reader = store_of("weaviate+http://localhost:1/Docs")
    assert reader is not None
    with pytest.raises(OptionError, match="Weaviate needs the package weaviate-client"):
        reader("weaviate+http://localhost:1/Docs", None, None)
    qdrant = store_of("qdrant+http://localhost:6333")
    assert qdrant is not None
    with pytest.raises(OptionError, match=r"should be like qdrant\+http"):
        qdrant("qdrant+http://localhost:6333", None, None)
