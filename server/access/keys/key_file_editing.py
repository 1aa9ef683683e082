"""Changes a file of keys, and leaves everything in it alone that is not to be changed."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import msgspec

from server.access.keys.key import Key
from server.access.keys.key_file import HEADER, KeyFileError, parse_keys, read_text

_ONLY_OWNER = 0o600


def with_key(text: str, key: Key, name: str) -> str:
    """The text of a file with one more key. Messages call the file by `name`."""
    known = parse_keys(text, name)
    if any(one.name == key.name for one in known):
        raise KeyFileError(
            f"{name}: there is a key of the name {key.name} already: remove it first, or choose another"
        )
    lines = ["[[keys]]"]
    for field in msgspec.structs.fields(Key):
        value = getattr(key, field.name)
        if field.required or value != field.default:
            lines.append(f"{field.name} = {_as_toml(value)}")
    before = text if not text or text.endswith("\n") else text + "\n"
    return before + ("\n" if before else "") + "\n".join(lines) + "\n"


def without_key(text: str, key_name: str, name: str) -> str:
    """The text of a file without the key of this name. Messages call the file by `name`."""
    known = parse_keys(text, name)
    found = [index for index, one in enumerate(known) if one.name == key_name]
    if not found:
        raise KeyFileError(f"{name}: there is no key of the name {key_name}")
    lines = text.splitlines(keepends=True)
    headers = [number for number, line in enumerate(lines) if HEADER.fullmatch(line.rstrip("\r\n"))]
    if len(headers) != len(known):
        raise KeyFileError(
            f"{name}: it is written in another way than with lines [[keys]]: change it by hand"
        )
    start, stop = [*headers, len(lines)][found[0] : found[0] + 2]
    while stop < len(lines) and stop - 1 > start and _is_remark(lines[stop - 1]):
        stop -= 1  # remarks before the next key are on that one
    return "".join(lines[:start] + lines[stop:])


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _as_toml(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(value)  # strings, numbers, booleans and lists of strings are the same in both


def change(path: Path, changed: Callable[[str], str]) -> None:
    """Replace the text of a file by a function of it, at once and not beside another change."""
    path = Path(os.path.realpath(path))
    try:
        with _alone(path.parent):
            text = changed(read_text(path) if path.exists() else "")
            parse_keys(text, str(path))
            _replace(path, text)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until nobody else changes files of this folder in this way."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Put a new file in a file's place, so that whoever reads it meanwhile has the old or the new one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            if path.exists():
                old = path.stat()
                os.fchmod(file.fileno(), old.st_mode & 0o777)
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            else:
                os.fchmod(file.fileno(), _ONLY_OWNER)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
