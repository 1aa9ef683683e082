"""Samples of an index, as texts with their vectors: some rows of a file of any length.

The reader of a file, or of a database (`index_stores`), finds more than are needed, spread over the whole. Of
these `choose` takes texts of all lengths, the longest among them, for only they tell where texts were cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from server.options.option_table import OptionError

Sample = tuple[str, object]
"""A text, and its vector as it was found."""

READ = 256
"""Rows that are looked at."""
_SMALL_FILE = 8 << 20
_LONGEST_LINE = 16 << 20
_TEXT_FIELDS = ("text", "document", "content", "page_content", "chunk", "input", "sentence", "body")
_VECTOR_FIELDS = ("vector", "embedding", "embeddings", "values", "emb", "vectors")


def choose(samples: Sequence[Sample], most: int) -> list[Sample]:
    """The longest texts, a quarter of all, and others spread over the lengths."""
    if len(samples) <= most:
        return list(samples)
    by_length = sorted(samples, key=lambda one: len(one[0]))
    longest, rest = by_length[-(most // 4) :], by_length[: -(most // 4)]
    count = most - len(longest)
    return [rest[i * (len(rest) - 1) // max(1, count - 1)] for i in range(count)] + longest


def read_file(
    path: Path, texts: Path | None, text_field: str | None, vector_field: str | None
) -> list[Sample]:
    """Raises OptionError if the file cannot be read."""
    try:
        match path.suffix.lower():
            case ".npy":
                return _read_matrix(path, texts)
            case ".parquet":
                return _read_parquet(path, text_field, vector_field)
            case ".jsonl" | ".ndjson" | ".json":
                rows = list(_lines(path))
            case _:
                raise OptionError(f"{path}: the file should be .jsonl, .npy (with --texts) or .parquet")
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}") from None
    return [field_values(row, text_field, vector_field, str(path)) for row in rows]


def field_values(row: dict[str, Any], text_field: str | None, vector_field: str | None, where: str) -> Sample:
    """The text and the vector of a row. Fields within others are named with dots."""
    found: list[object] = []
    for flag, named, usual in (
        ("--text-field", text_field, _TEXT_FIELDS),
        ("--vector-field", vector_field, _VECTOR_FIELDS),
    ):
        name = named or next((name for name in usual if name in row), None)
        value: Any = row
        for part in (name or "").split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            known = ", ".join(map(str, islice(row, 12)))
            raise OptionError(f"{where}: which field is it? Name it by {flag}; there are {known}")
        found.append(value)
    return str(found[0]), found[1]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of JSON lines: of a long file those at places spread over it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _SMALL_FILE:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _row(line, f"{path}, line {number}")
            return
        for index in range(READ):
            file.seek(size * index // READ)
            if index:
                file.readline(_LONGEST_LINE)  # the rest of a line
            if line := file.readline(_LONGEST_LINE).strip():
                yield _row(line, f"{path}, at byte {file.tell()}")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        raise OptionError(f"{where} is not JSON") from None
    if not isinstance(row, dict):
        raise OptionError(f"{where} is no object with a text and a vector")
    return row


def _read_matrix(path: Path, texts: Path | None) -> list[Sample]:
    if texts is None:
        raise OptionError(
            f"{path} has vectors only: name the file of their texts by --texts, a line for each"
        )
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise OptionError(f"{path} is no matrix of numbers: {error}") from None
    if matrix.ndim != 2 or not len(matrix):
        raise OptionError(f"{path} has the shape {matrix.shape}, and should have rows of numbers")
    wanted = sorted({len(matrix) * i // READ for i in range(READ)})
    found: list[Sample] = []
    with texts.open("rb") as file:
        for place, line in enumerate(file):
            if len(found) == len(wanted):
                break
            if place == wanted[len(found)]:
                text = _text(line, texts) if texts.suffix == ".jsonl" else line.decode("utf-8", "replace")
                found.append((text.rstrip("\r\n"), matrix[place]))
    if len(found) < len(wanted):
        raise OptionError(f"{texts} has fewer lines than {path} has rows ({len(matrix)})")
    return found


def _text(line: bytes, where: Path) -> str:
    value = json.loads(line)
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise OptionError(f"{where}: a line is neither a string nor an object with a string `text`")
    return text


def _read_parquet(path: Path, text_field: str | None, vector_field: str | None) -> list[Sample]:
    parquet = optional("pyarrow.parquet", "pyarrow", str(path))
    file = parquet.ParquetFile(path)
    groups = file.num_row_groups
    chosen = sorted({groups * i // 8 for i in range(8)})
    rows: list[dict[str, Any]] = []
    for group in chosen:
        batch = next(file.iter_batches(batch_size=READ // len(chosen), row_groups=[group]), None)
        rows += [] if batch is None else batch.to_pylist()
    return [field_values(row, text_field, vector_field, str(path)) for row in rows]


def optional(module: str, package: str, for_what: str) -> Any:
    """A library that few need. Raises OptionError if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise OptionError(f"{for_what} needs the package {package}: pip install {package}") from None


Reader = Callable[[str, str | None, str | None], list[Sample]]
"""Reads from a database at a URL, with the names of the fields of text and vector."""
