"""`facet embed`: vectors of the lines of files, as a .npy matrix or as JSON lines."""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from server.options.option_table import OptionError
from server.terminal.screen import Bar
from server.terminal.server_flags import add_server_flags, model_of, parser_of, server_of

if TYPE_CHECKING:
    import numpy as np

_AT_ONCE = 4
"""Requests under way, so that the server always has one to go on with."""


def run(arguments: Sequence[str], command: str, api_key: str | None) -> int:
    given = _parser(command).parse_args(arguments)
    _check(given)
    texts = [text for name in given.files for text in _texts(name, whole=given.whole_files)]
    if not texts:
        raise OptionError("there is no text in these files")
    with server_of(given, api_key) as server:
        fields = {"model": model_of(server, given, "embed"), "encoding_format": "base64"}
    if given.dimensions is not None:
        fields["dimensions"] = given.dimensions
    if given.prompt_name is not None:
        fields["prompt_name"] = given.prompt_name
    bar = Bar(len(texts), "text")
    batches = _embedded(given, api_key, texts, fields, bar)
    output = None if given.output in (None, "-") else Path(given.output)
    if output is not None and output.suffix == ".npy":
        _write_matrix(output, len(texts), batches)
    elif output is not None:
        part = output.with_name(output.name + ".part")
        with part.open("wb") as file:
            _write_lines(file, texts, batches, with_texts=given.with_texts)
        part.replace(output)
    else:
        _write_lines(sys.stdout.buffer, texts, batches, with_texts=given.with_texts)
    bar.close()
    return 0


def _texts(name: str, *, whole: bool) -> Iterator[str]:
    """The texts of a file: its lines that are not empty, or all of it; of .jsonl the strings or `text`s."""
    try:
        content = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise OptionError(f"{name} cannot be read: {reason}") from None
    if whole:
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        yield _text_of(line, f"{name}, line {number}") if name.endswith(".jsonl") else line.rstrip("\r")


def _text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        raise OptionError(f"{where} is not JSON") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise OptionError(f"{where} is neither a string nor an object with a string `text`")
    return text


def _embedded(
    given: argparse.Namespace, api_key: str | None, texts: Sequence[str], fields: dict[str, Any], bar: Bar
) -> Iterator[np.ndarray]:
    """The vectors of the texts, [batch, dimensions] float32 each, in their order."""
    import numpy as np  # not for --help, and not before the server has answered

    def embed(start: int) -> np.ndarray:
        batch = texts[start : start + given.batch_size]
        with server_of(given, api_key) as server:
            data = server.post("/v1/embeddings", {**fields, "input": batch})["data"]
        bar.add(len(batch))
        rows = sorted(data, key=lambda one: one["index"])
        return np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in rows])

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting = [pool.submit(embed, start) for start in range(0, len(texts), given.batch_size)]
        try:
            for one in waiting:
                yield one.result()
        finally:
            for one in waiting:
                one.cancel()


def _write_matrix(path: Path, rows: int, batches: Iterator[np.ndarray]) -> None:
    """Writes [rows, dimensions] float32 as the batches come, and gives the file its name when it is whole."""
    import numpy as np

    part = path.with_name(path.name + ".part")
    matrix, done = None, 0
    for batch in batches:
        if matrix is None:
            matrix = np.lib.format.open_memmap(part, "w+", np.float32, (rows, batch.shape[1]))
        matrix[done : done + len(batch)] = batch
        done += len(batch)
    if matrix is not None:
        matrix.flush()
        part.replace(path)


def _write_lines(
    out: BinaryIO, texts: Sequence[str], batches: Iterator[np.ndarray], *, with_texts: bool
) -> None:
    index = 0
    for batch in batches:
        for vector in batch.tolist():
            line: dict[str, object] = {"index": index, "embedding": [float(f"{x:.9g}") for x in vector]}
            if with_texts:
                line["text"] = texts[index]
            out.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            index += 1
        out.flush()


def _check(given: argparse.Namespace) -> None:
    if given.batch_size < 1:
        raise OptionError("--batch-size must be at least 1")
    if given.output is not None and not Path(given.output).parent.is_dir():
        raise OptionError(f"-o {given.output}: there is no folder {Path(given.output).parent}; make it first")
    if given.with_texts and str(given.output).endswith(".npy"):
        raise OptionError("--with-texts is for JSON lines: a .npy matrix has no room for texts")


def _parser(command: str) -> argparse.ArgumentParser:
    parser = parser_of(command, "Make vectors of texts with a running server.", "FILE... [options]")
    add_server_flags(parser)
    parser.add_argument("files", nargs="+", metavar="FILE", help="A text in each line; - is standard input.")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="A .npy matrix of float32, else JSON lines; default: print."
    )
    parser.add_argument("--whole-files", action="store_true", help="Each file is one text.")
    parser.add_argument("--with-texts", action="store_true", help="Put the texts into the JSON lines.")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="Texts in a request (64).")
    parser.add_argument("--dimensions", type=int, metavar="N", help="Shorter vectors, if the model has them.")
    parser.add_argument("--prompt-name", metavar="NAME", help="The model's prompt to put before each text.")
    return parser
