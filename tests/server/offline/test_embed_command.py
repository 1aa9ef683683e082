"""`facet embed`: texts in, vectors out, by a server and by a model in this process."""

import gc
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
from fake_frontend import FakeFrontend, vectors
from served_app import served

from facet import LLM
from models.pooling.config import PoolingConfig
from models.pooling.text_files import TextFacts
from server.offline import embed_command, llm
from server.options.server_flags import ServerConfig
from server.requests.pooling import PoolingParams
from server.run.commands import BAD_USAGE, FAILED, INTERRUPTED, run
from server.text.tokenizer import unpack

SMALL = ["--dtype", "float32", "--kv-cache-memory-bytes", "4m", "--cpu-threads", "1"]


@pytest.fixture(autouse=True)
def _process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Have models that were closed be collected: this process does not end with the command."""
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture
def frontend() -> FakeFrontend:
    """A model whose vectors tell how long a text is, in bytes and its BOS."""
    frontend = FakeFrontend()
    frontend.serve("embed")
    frontend.answer_of = lambda item: vectors([item.length - 1, 0.1])
    return frontend


@pytest.fixture
def url(frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(sys.modules, "server.offline.llm", None)  # a server is asked without it, and torch
    with served(frontend) as address:
        yield address


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def read_lines(written: str) -> list[list[float]]:
    return [json.loads(line) for line in written.splitlines()]


@pytest.mark.parametrize(
    ("words", "content", "lengths"),
    [
        (["a", "bb"], b"", [1, 2]),
        (["--", "-c", "--url"], b"", [2, 5]),
        (["-1", "--truncate-prompt-tokens", "-1"], b"", [2]),
        ([], b"a\nbb\r\nccc", [1, 2, 3]),
        (["-i", "-"], b" a \n", [3]),
        (["-z"], b"a\nb\0cc\0", [3, 2]),
        (["--null"], b"a\0b\n", [1, 2]),
    ],
)
def test_texts_are_words_or_what_a_pipe_brings(
    words: list[str],
    content: bytes,
    lengths: list[int],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe(monkeypatch, content)
    assert run("facet", ["embed", "--url", url, *words]) == 0
    shown = capsys.readouterr()
    assert [length for length, _ in read_lines(shown.out)] == lengths
    assert shown.out.splitlines()[0].endswith(",0.10000000149011612]") and shown.err == ""


def test_a_large_file_is_asked_in_parts_and_stays_in_order(
    url: str, frontend: FakeFrontend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [1 + number % 9 for number in range(600)]
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join("x" * length for length in lengths))
    assert run("facet", ["embed", "--url", url, "-i", str(source), "-o", str(out)]) == 0
    assert [row[0] for row in read_lines(out.read_text())] == lengths
    assert [len(items) for items, _ in frontend.pooled] == [256, 256, 88]
    array = tmp_path / "out.npy"
    assert run("facet", ["embed", "--url", url, "-i", str(source), "-o", str(array)]) == 0
    found = np.load(array)
    assert (found.dtype, found.shape) == (np.float32, (600, 2))
    assert found[:, 0].tolist() == lengths
    assert capsys.readouterr() == ("", "")


def test_options_of_vectors_reach_the_server(url: str, frontend: FakeFrontend) -> None:
    prompts = TextFacts(prompts={"query": "Find: "})
    frontend.serve("embed", pooling=PoolingConfig(matryoshka=True, texts=prompts))
    words = ["abc", "--dimensions", "4", "--prompt-name", "query", "--truncate-prompt-tokens", "9"]
    assert run("facet", ["embed", "--url", url, *words]) == 0
    [item] = frontend.pooled[-1][0]
    assert (item.params.dimensions, item.params.query) == (4, True)
    assert frontend.tokenizer.decode(unpack(item.tokens)[1:], False) == "Find: ab"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x" * 900], "maximum context length is 128 tokens"),
        (["a", "--prompt-name", "query"], "no prompt named 'query'"),
        (["a", "--dimensions", "4"], "does not support Matryoshka"),
        (["a", "--model", "other"], "has no model other; it has org/tiny"),
    ],
)
def test_what_the_server_refuses_is_said(
    words: list[str], said: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("facet", ["embed", "--url", url, *words]) == FAILED
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""


def test_vectors_before_a_text_that_is_refused_are_written(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, b"a\n" * 300 + b"x" * 900)
    assert run("facet", ["embed", "--url", url]) == FAILED
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 256
    assert "of the texts from 257 to 301: " in shown.err and "input 44 " in shown.err


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        ([], b"a\n\nb", "standard input, line 2 is empty"),
        (["-z"], b"a\0\n\0", "standard input, text 2 is empty"),
        ([""], b"", "text 1 is empty"),
        ([], b"", "standard input is empty: give texts"),
        ([], b"a\n\xff\n", "standard input, line 2 is not text in UTF-8"),
        (["-i", "/no/in"], b"", "-i /no/in cannot be read: No such file or directory"),
        (["a", "-i", "/no/in"], b"", "as words and with -i"),
        (["-i", "/no/../x", "-o", "/x"], b"", "-i and -o name the same file"),
        (["a", "-o", "/no/out"], b"", "there is no folder /no"),
        (["a", "--dimension", "3"], b"", "did you mean --dimensions?"),
        (["a", "--dtype", "float32"], b"", "--dtype: with --url another server answers"),
        (["a", "--dtypo", "float32"], b"", "there is no option --dtypo"),
    ],
)
def test_wrong_inputs_and_options(
    words: list[str],
    content: bytes,
    said: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe(monkeypatch, content)
    assert run("facet", ["embed", "--url", url, *words]) == BAD_USAGE
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""


def test_a_terminal_brings_no_texts(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, b"a")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert run("facet", ["embed", "--url", url]) == BAD_USAGE
    assert "give texts: as words, with -i FILE, or through a pipe" in capsys.readouterr().err


def test_ctrl_c_ends_the_command(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(embed_command, "model_of", interrupt)
    assert run("facet", ["embed", "--url", url, "a"]) == INTERRUPTED


def test_vectors_are_those_of_an_llm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that generates is loaded to pool, options of `serve` may stand anywhere, and a pipe may end."""
    texts = ["Paris is in France.", "-5", "Bananas are yellow. " * 9]
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "4m", "cpu_threads": 1}
    with LLM("demo", **options) as model:
        expected = [one.outputs.embedding for one in model.embed(texts, use_tqdm=False)]
    capsys.readouterr()
    assert run("facet", ["embed", "demo", texts[0], *SMALL, *texts[1:]]) == 0
    shown = capsys.readouterr()
    assert np.allclose(read_lines(shown.out), expected, atol=1e-5)
    assert shown.err == "", "a start is shown on a terminal only"
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert run("facet", ["embed", "--model", "demo", *texts, *SMALL]) == FAILED
    assert capsys.readouterr().err == ""


def test_a_model_is_asked_as_a_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt named query makes queries of texts, as in requests; --runner wins over what vectors need."""
    asked: list[Any] = []

    class Model:
        facts = SimpleNamespace(tasks=("embed",))

        def __init__(self, config: ServerConfig, **options: Any) -> None:
            asked.append(config.engine.runner)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            asked.append("closed")

        def embed(self, texts: list[str], *, pooling_params: PoolingParams, **options: Any) -> list[Any]:
            asked.append((pooling_params.dimensions, pooling_params.query, options))
            return []

    monkeypatch.setattr(llm, "LLM", Model)
    words = ["--dimensions", "4", "--prompt-name", "query", "--truncate-prompt-tokens", "9"]
    assert run("facet", ["embed", "m", "a", *words]) == 0
    options = {"prompt_name": "query", "truncate_prompt_tokens": 9, "use_tqdm": False}
    assert asked == ["pooling", (4, True, options), "closed"]
    assert run("facet", ["embed", "m", "a", "--runner", "generate"]) == 0
    assert asked[3] == "generate" and asked[4][:2] == (None, False)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "token_embed"], "demo cannot embed; it can token_embed"),
        (["--dimensions", "4"], "does not support Matryoshka"),
        (["--prompt-name", "query"], "no prompt named 'query'"),
        (["--max-model-len", "16", "word " * 20], "maximum context length is 16 tokens"),
        (["--truncate-prompt-tokens", "-5"], "must be at least -1"),
        (["--convert", "none"], "does not pool by itself: say --convert embed"),
    ],
)
def test_what_a_model_refuses_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("facet", ["embed", "demo", "a", *SMALL, *words]) == FAILED
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("facet", ["embed", "./no", "a"]) == FAILED
    assert "'./no' is neither a folder nor a GGUF file here" in capsys.readouterr().err
