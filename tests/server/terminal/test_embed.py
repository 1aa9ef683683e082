"""`facet embed` against the real HTTP API."""

import json
from pathlib import Path

import numpy as np
import pytest
from fake_frontend import FakeFrontend, vectors

from server.commands import BAD_USAGE, FAILED, run


@pytest.fixture
def embedder(frontend: FakeFrontend) -> None:
    frontend.serve("generate", "embed")
    frontend.answer_of = lambda item: vectors(np.sin(np.arange(1, 9) * sum(item.tokens)))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("first\n\nsecond\r\nthird\n")
    return path


@pytest.mark.usefixtures("embedder")
@pytest.mark.parametrize("size", ["1", "2", "64"])
def test_a_matrix_has_a_row_for_each_line(
    url: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    out = tmp_path / "v.npy"
    assert run("facet", ["embed", str(texts), "--url", url, "-o", str(out), "--batch-size", size]) == 0
    matrix = np.load(out)
    assert (matrix.dtype, matrix.shape) == (np.float32, (3, 8))
    assert run("facet", ["embed", str(texts), "--url", url]) == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert np.array([line["embedding"] for line in lines], np.float32).tobytes() == matrix.tobytes()
    assert "3 texts in" in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "v.npy"]


@pytest.mark.usefixtures("embedder")
def test_json_lines_bring_texts_and_take_them_along(url: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"one\\ntext"\n{"text": "two", "more": 1}\n')
    assert run("facet", ["embed", str(source), "--url", url, "-o", str(out), "--with-texts"]) == 0
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["one\ntext", "two"]


@pytest.mark.usefixtures("embedder")
def test_a_file_may_be_one_text(url: str, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    assert run("facet", ["embed", str(texts), "--url", url, "-o", str(out), "--whole-files"]) == 0
    assert np.load(out).shape == (1, 8)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["/no/file"], "/no/file cannot be read"),
        (["{texts}", "-o", "/no/folder/v.npy"], "there is no folder /no/folder"),
        (["{texts}", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["{texts}", "-o", "v.npy", "--with-texts"], "--with-texts is for JSON lines"),
        (["{broken}"], "line 2 is neither a string nor an object"),
        (["{empty}"], "there is no text"),
        ([], "FILE"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(
    arguments: list[str], reason: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, empty = tmp_path / "broken.jsonl", tmp_path / "empty.txt"
    broken.write_text('"fine"\n{"texts": "no"}\n')
    empty.write_text("\n \n")
    named = [one.format(texts=texts, broken=broken, empty=empty) for one in arguments]
    assert run("facet", ["embed", *named, "--url", "http://127.0.0.1:1"]) == BAD_USAGE
    assert reason in capsys.readouterr().err


def test_a_model_without_vectors_is_told(url: str, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("facet", ["embed", str(texts), "--url", url]) == FAILED
    assert "org/tiny cannot embed; it can generate" in capsys.readouterr().err
