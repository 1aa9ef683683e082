"""Reads the header of a model.bin of CTranslate2: where each variable lies. Needs no torch.

Anybody may have written the file, so every length is held against the bytes that are there.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from models.plain_files import FileError, check_regular, shown

WEIGHTS = "model.bin"
_VERSIONS = range(5, 7)
_NUMBERS = {
    0: ("float32", "f"),
    1: ("int8", "b"),
    2: ("int16", "h"),
    3: ("int32", "i"),
    4: ("float16", "e"),
    5: ("bfloat16", ""),
}
"""Types of variables by their number in the file, as torch and as `struct` name them."""
_SIZES = {"float32": 4, "int8": 1, "int16": 2, "int32": 4, "float16": 2, "bfloat16": 2}
_MOST_VARIABLES, _MOST_DIMENSIONS = 1 << 16, 4


@dataclass(frozen=True)
class Variable:
    """An array of the file that is not read."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    """The first byte in the file."""
    value: float | None
    """The value, if it is a single one."""


@dataclass(frozen=True)
class ModelFile:
    """What a model.bin holds."""

    path: Path
    specification: str
    """CTranslate2's name of the kind of model, such as WhisperSpec."""
    variables: Mapping[str, Variable]

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """The shape of a variable that the model must have. Raises FileError."""
        found = self.variables.get(name)
        if found is None or len(found.shape) != dimensions:
            raise FileError(f"{self.path}: {name} is missing, or has not {dimensions} dimensions")
        return found.shape

    def number(self, name: str) -> int:
        """A single value that the model must have. Raises FileError."""
        found = self.variables.get(name)
        if found is None or found.value is None:
            raise FileError(f"{self.path}: {name} is missing, or no single number")
        return int(found.value)

    def layers(self, stack: str) -> int:
        """The number of layers of the encoder or the decoder."""
        return len(
            {
                name.split("/")[1]
                for name in self.variables
                if name.startswith(f"{stack}/layer_") and name.count("/") > 2
            }
        )


def specification_of(path: Path) -> str | None:
    """CTranslate2's name of the kind of model that a file holds; None if it is no such file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        begin = file.read(70)
    version, length = struct.unpack("<IH", begin[:6].ljust(6, b"\0"))
    name = begin[6 : 6 + length]
    is_name = version in _VERSIONS and 1 < length <= 64 and name.endswith(b"\0") and name[:-1].isalnum()
    return name[:-1].decode("ascii") if is_name else None


def read_file(path: Path) -> ModelFile:
    """Read the header of a file. Raises FileError."""
    size = check_regular(path)
    with path.open("rb") as file:
        try:
            return _Reader(path, file, size).read()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise FileError(
                f"{path}: not a whole file of CTranslate2: it is cut off or damaged at byte {file.tell()}"
            ) from error


class _Reader:
    """Reads one file from its beginning on, and skips what its variables hold."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size

    def read(self) -> ModelFile:
        version = self._number("I")
        if version not in _VERSIONS:
            raise FileError(
                f"{self._path}: version {version} of CTranslate2's format is not read, but 5 and 6 are: "
                "convert it again"
            )
        specification = self._text()
        self._number("I")  # the revision of the specification
        variables: dict[str, Variable] = {}
        for _ in range(min(self._number("I"), _MOST_VARIABLES)):
            name = self._text()
            variables[name] = self._variable(name)
        return ModelFile(self._path, specification, variables)

    def _variable(self, name: str) -> Variable:
        shape = tuple(self._number("I") for _ in range(self._number("B")))
        dtype, letter = _NUMBERS[self._number("B")]
        length = self._number("I")
        offset = self._file.tell()
        if (
            len(shape) > _MOST_DIMENSIONS
            or length != prod(shape) * _SIZES[dtype]
            or offset + length > self._size
        ):
            raise FileError(
                f"{self._path}: {shown(name)} does not fit into the file: it is cut off or damaged; download "
                "it again"
            )
        value = None
        if not shape and letter:
            value = struct.unpack(f"<{letter}", self._file.read(length))[0]
        self._file.seek(offset + length)
        return Variable(shape, dtype, offset, value)

    def _number(self, letter: str) -> int:
        return struct.unpack(f"<{letter}", self._file.read(struct.calcsize(f"<{letter}")))[0]

    def _text(self) -> str:
        return self._file.read(self._number("H"))[:-1].decode("utf-8")
