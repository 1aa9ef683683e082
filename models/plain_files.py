"""Reading of small files of a checkpoint, of which anybody may have written anything. No torch.

A pipe would keep a reader waiting for ever, and a device may never end, so only regular files are opened.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

Fields = TypeVar("Fields")

MOST_JSON_BYTES = 256 << 20
"""More than any index of weights has; without a bound a file could take all memory."""

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe (FIFO)"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class ConfigError(ValueError):
    """The checkpoint cannot be served as it is; the message names the file and the field."""


class FileError(ConfigError):
    """A file cannot be read, or does not hold what its name promises; the message begins with its path."""


def check_regular(path: Path) -> int:
    """Return the size of a regular file; raise FileError for anything else, before it is opened."""
    try:
        found = path.stat()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = next((kind for matches, kind in _KINDS if matches(found.st_mode)), "something else")
        raise FileError(f"{path} is {kind}, not a regular file")
    return found.st_size


def lies_within(name: str) -> bool:
    """Whether a path that a file names stays within the folder of that file, whatever links lie there."""
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def read_text_bytes(path: Path) -> bytes:
    """Read a small file whole."""
    size = check_regular(path)
    if size > MOST_JSON_BYTES:
        raise FileError(f"{path} is {size >> 20} MiB long, and {MOST_JSON_BYTES >> 20} are allowed")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    try:
        return read_text_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} cannot be read as text: {error}") from None


def read_json(path: Path, object_hook: Callable[[dict[str, Any]], object] | None = None) -> object:
    """Read a file of JSON. `object_hook` is that of `json.loads`."""
    try:
        return json.loads(read_text_bytes(path), object_hook=object_hook)
    except RecursionError:
        raise FileError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"{path} cannot be read as JSON: {error}") from None


def read_object(
    path: Path, object_hook: Callable[[dict[str, Any]], object] | None = None
) -> dict[str, object]:
    """Read a file of JSON that must hold an object."""
    value = read_json(path, object_hook)
    if isinstance(value, dict):
        return cast("dict[str, object]", value)
    raise ConfigError(f"{path} must hold a JSON object, but holds {type(value).__name__}")


def typed(fields: object, kind: type[Fields], place: str, *, strict: bool = True) -> Fields:
    """Read fields of JSON into the struct that has their types. Raises ConfigError, which names the place."""
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from None


def shown(name: str) -> str:
    """A tensor's name for a message; one that anybody may have written can have any length."""
    return name if len(name) <= 80 else f"{name[:50]}...{name[-20:]}"


def stored_dtype(folder: Path) -> str:
    """The number type of the checkpoint's first tensor that a model can have; only its header is read."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    path = next(iter(sorted(folder.glob("*.safetensors"))), None)
    if path is None:
        return "float32"
    stored = (tensor.dtype for tensor in read_tensor_header(path).values())
    return next((names[dtype] for dtype in stored if dtype in names), "float32")


class TensorPlace(NamedTuple):
    """A tensor of a file of safetensors: its type and shape, and its first byte and the one behind it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_tensor_header(path: Path) -> dict[str, TensorPlace]:
    """Read what a file of safetensors says of its tensors, of which none is read. Raises FileError."""
    length = check_regular(path)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(size, length, MOST_JSON_BYTES)))
        return {
            name: TensorPlace(
                str(told["dtype"]),
                tuple(map(int, told["shape"])),
                *(8 + size + int(offset) for offset in told["data_offsets"]),
            )
            for name, told in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} has no readable safetensors header: {error}") from None
