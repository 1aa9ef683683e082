"""Reads a file of keys: TOML, with a table `[[keys]]` for each. A mistake is told with its line and field."""

from __future__ import annotations

import re
import tomllib
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from server.access.keys.key import Key, explain

MOST_BYTES = 16 << 20

HEADER = re.compile(r"\s*\[\[\s*keys\s*\]\]\s*(#.*)?")
"""A line with which the table of a key begins."""
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


class KeyFileError(ValueError):
    """A file of keys that cannot be used; the message is one line that names the file, line and field."""


class State(NamedTuple):
    """What tells one state of a file from another without reading it."""

    modified: int
    size: int
    number: int


def state_of(path: Path) -> State | None:
    """The state of a file now; None if it is not there, or must not be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return State(found.st_mtime_ns, found.st_size, found.st_ino)


def read_keys(path: Path) -> list[Key]:
    """Reads all keys of a file. Raises KeyFileError if anything is wrong with any of them."""
    return parse_keys(read_text(path), str(path))


def read_text(path: Path) -> str:
    try:
        if not path.is_file():
            raise KeyFileError(f"{path}: there is no such file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None
    if len(data) > MOST_BYTES:
        raise KeyFileError(f"{path}: it has more than {MOST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise KeyFileError(f"{path}: line {line}: this is not UTF-8") from None


def parse_keys(text: str, name: str) -> list[Key]:
    """Reads the text of a file, which messages call by `name`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        last = text.count("\n") + 1
        raise KeyFileError(
            f"{name}: {error}".replace("at end of document", f"at line {last}, the last")
        ) from None
    except RecursionError:
        raise KeyFileError(f"{name}: it is nested too deeply") from None
    lines = _Lines(text, name)
    for field in document:
        if field != "keys":
            raise KeyFileError(
                lines.message(None, field, "a file of keys has tables [[keys]] and nothing else")
            )
    entries = document.get("keys", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise KeyFileError(lines.message(None, "keys", "write a table [[keys]] for each key"))
    keys = [_read_entry(entry, index, lines) for index, entry in enumerate(entries)]
    for field in ("name", "sha256"):
        known: dict[str, int] = {}
        for index, key in enumerate(keys):
            if (first := known.setdefault(getattr(key, field), index)) != index:
                text = f"the key at line {lines.header(first)} has the same"
                raise KeyFileError(lines.message(index, field, text))
    return keys


def _read_entry(entry: dict[str, Any], index: int, lines: _Lines) -> Key:
    if (expires := entry.get("expires")) is not None:
        try:
            entry = {**entry, "expires": moment_of(expires)}
        except ValueError as error:
            raise KeyFileError(lines.message(index, "expires", str(error))) from None
    try:
        return msgspec.convert(entry, Key)
    except msgspec.ValidationError as error:
        raise KeyFileError(lines.explain(index, error)) from None


def moment_of(value: object) -> datetime:
    """The moment that a date, or a time with an offset, stands for. A date is its beginning in UTC."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("a time needs an offset, such as the Z of 2027-01-31T12:00:00Z")
        return value
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC)
    raise ValueError("write a date, such as 2027-01-31, or a time with its offset, and no quotes around it")


class _Lines:
    """Finds the lines at which fields stand: the parser of TOML does not tell them."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines = text.splitlines()
        self._headers = [number for number, line in enumerate(self._lines) if HEADER.fullmatch(line)]

    def header(self, index: int) -> int | str:
        return self._headers[index] + 1 if index < len(self._headers) else "?"

    def message(self, index: int | None, field: str, text: str) -> str:
        """The message on a field of the key of this index, or of the file itself."""
        start, stop = 0, len(self._lines)
        if index is not None:
            if index >= len(self._headers):  # the keys are written in another way than with headers
                return f"{self._name}: key number {index + 1}: {field}: {text}"
            start, stop = [*self._headers, stop][index : index + 2]
        field_at = re.compile(rf"""\s*\[?\[?["']?{re.escape(field)}["']?\s*[=.\]]""")
        found = [number for number in range(start, stop) if field_at.match(self._lines[number])]
        return f"{self._name}: line {(found or [start])[0] + 1}: {field}: {text}"

    def explain(self, index: int, error: msgspec.ValidationError) -> str:
        """The message on what msgspec has found wrong with the key of this index."""
        if unknown := _UNKNOWN.search(str(error)):
            fields = ", ".join(Key.__struct_fields__)
            return self.message(index, unknown[1], f"there is no such field; there are {fields}")
        if missing := _MISSING.search(str(error)):
            return self.message(index, missing[1], "the key has none")
        field, text = explain(error)
        return self.message(index, field or "keys", text)
