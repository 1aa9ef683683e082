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
from server.terminal.console import ProgressBar, check_folder, parser_of, read_text
from server.terminal.server_client import add_server_flags, client_of, model_of

if TYPE_CHECKING:
    import numpy as np

_AT_ONCE = 4
"""Requests under way, so that the server always has one to go on with."""


def run(arguments: Sequence[str], command: str) -> int:
    given = _parser(command).parse_args(arguments)
    _check(given)
    texts = [text for name in given.files for text in _texts(name, whole=given.whole_files)]
    if not texts:
        raise OptionError("there is no text in these files")
    with client_of(given) as server:
        fields = {"model": model_of(server, given, "embed"), "encoding_format": "base64"}
    optional = {"dimensions": given.dimensions, "prompt_name": given.prompt_name}
    fields |= {name: value for name, value in optional.items() if value is not None}
    bar = ProgressBar(len(texts), "text")
    batches = _embedded(given, texts, fields, bar)
    shown_texts = texts if given.with_texts else None
    if given.output in (None, "-"):
        _write_lines(sys.stdout.buffer, batches, shown_texts)
    else:
        output = Path(given.output)
        part = output.with_name(output.name + ".part")
        if output.suffix == ".npy":
            _write_matrix(part, len(texts), batches)
        else:
            with part.open("wb") as file:
                _write_lines(file, batches, shown_texts)
        part.replace(output)  # it has its name when it is whole
    bar.close()
    return 0


def _texts(name: str, *, whole: bool) -> Iterator[str]:
    """The texts of a file: its lines that are not empty, or all of it; of .jsonl the strings or `text`s."""
    content = read_text(None if name == "-" else Path(name), name)
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
    given: argparse.Namespace, texts: Sequence[str], fields: dict[str, Any], bar: ProgressBar
) -> Iterator[np.ndarray]:
    """The vectors of the texts, [batch, dimensions] float32 each, in their order."""
    import numpy as np  # not for --help, and not before the server has answered

    def embed(start: int) -> np.ndarray:
        batch = texts[start : start + given.batch_size]
        with client_of(given) as server:
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
    """Writes [rows, dimensions] float32 as the batches come."""
    import numpy as np

    matrix, done = None, 0
    for batch in batches:
        if matrix is None:
            matrix = np.lib.format.open_memmap(path, "w+", np.float32, (rows, batch.shape[1]))
        matrix[done : done + len(batch)] = batch
        done += len(batch)
    if matrix is not None:
        matrix.flush()


def _write_lines(out: BinaryIO, batches: Iterator[np.ndarray], texts: Sequence[str] | None) -> None:
    index = 0
    for batch in batches:
        for vector in batch.tolist():
            line: dict[str, object] = {"index": index, "embedding": [float(f"{x:.9g}") for x in vector]}
            if texts is not None:
                line["text"] = texts[index]
            out.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            index += 1
        out.flush()


def _check(given: argparse.Namespace) -> None:
    if given.batch_size < 1:
        raise OptionError("--batch-size must be at least 1")
    check_folder("-o", given.output)
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
