"""Reads a GGUF file: its metadata, and where each tensor lies. Needs no torch, and touches no tensor's bytes.

Anybody may have written the file, so every count and length is held against the bytes that are there. Errors
name file and field.
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

from models.plain_files import FileError, check_regular, shown
from models.quantization.methods.gguf import GGML_TYPES, REMOVED

Value: TypeAlias = "str | int | float | bool | list[str] | array[int] | array[float]"
"""A value of the metadata; an array of numbers stays one."""

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_HEADER_BYTES = 512 << 20
"""Bytes of metadata and tensors' names beyond which a file is taken for broken: 20 times any model's."""
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_SHORTEST_FIELD = 8 + 4 + 1
_SHORTEST_TENSOR = 8 + 4 + 4 + 8

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of single values by their number in the file, as `struct` names them."""
_STRING, _ARRAY = 8, 9

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file that is not read."""

    name: str
    shape: tuple[int, ...]
    """Sizes as torch orders them: numbers that lie side by side are those of the last dimension."""
    coding: str
    """GGML's name of how the numbers are stored: F32, Q4_K and so on."""
    file: Path
    offset: int
    """The first byte in that file."""
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file, or all the parts of one that was split."""

    path: Path
    """The file, or the first part."""
    parts: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read a file, and if it is one part of several, the others beside it. Raises FileError."""
    parts = part_paths(path)
    files = [_Reader(part).read() for part in parts]
    first = files[0].metadata
    if len(parts) == 1:
        if (count := first.get("split.count", 1)) not in (0, 1):
            raise FileError(
                f"{path}: split.count is {count}, but the name is not that of a part; give it back the name "
                f"that it was made with, such as model-00001-of-{count:0>5}.gguf"
            )
        return files[0]
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        for field, expected in (("split.no", number), ("split.count", len(parts))):
            if file.metadata.get(field) != expected:
                raise FileError(
                    f"{file.path}: {field} is {file.metadata.get(field)}, but its name says {expected}; the "
                    "parts must have the names that they were made with"
                )
        tensors.update(_unlike(tensors, file))
    if (total := first.get("split.tensors.count", len(tensors))) != len(tensors):
        raise FileError(f"{parts[0]}: split.tensors.count is {total}, but the parts hold {len(tensors)}")
    return GgufFile(parts[0], tuple(parts), first, tensors)


def part_paths(path: Path) -> list[Path]:
    """List the file, or by its name all the parts of which it is one. Raises FileError if one is missing."""
    name = _PART.fullmatch(path.name)
    if name is None or int(name["count"]) < 2:
        return [path]
    count = int(name["count"])
    parts = (path.with_name(f"{name['stem']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1))
    found: list[Path] = []
    for part in parts:
        if not part.exists():
            raise FileError(f"{part} is missing: {path.name} is one of {count} parts, and all are needed")
        found.append(part)
    return found


def _unlike(known: Mapping[str, object], file: GgufFile) -> Mapping[str, GgufTensor]:
    if twice := next((name for name in file.tensors if name in known), None):
        raise FileError(f"{file.path}: the tensor {shown(twice)} is in an earlier part too")
    return file.tensors


class _Reader:
    """Reads one file from its beginning on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = check_regular(path)
        self._at = 0
        self._end = min(self._size, _MOST_HEADER_BYTES)
        self._field = "the header"

    def read(self) -> GgufFile:
        try:
            with self._path.open("rb") as file:
                self._check_magic(file.read(8))
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._data:
                    return self._read()
        except OSError as error:
            raise FileError(f"{self._path} cannot be read: {error.strerror}") from None

    def _check_magic(self, start: bytes) -> None:
        if start[:4] != MAGIC:
            raise FileError(f"{self._path} is not a GGUF file: it begins with {start[:4]!r}, not {MAGIC!r}")
        version = int.from_bytes(start[4:], "little")
        if version in _VERSIONS and len(start) == 8:
            return
        if int.from_bytes(start[4:], "big") in _VERSIONS:
            raise FileError(f"{self._path} is a big-endian GGUF file; convert the model for little-endian")
        raise FileError(
            f"{self._path}: GGUF version {version} is not read, only 2 and 3; convert the model again with a "
            "newer llama.cpp"
        )

    def _read(self) -> GgufFile:
        self._at = 8
        tensor_count, field_count = self._number("Q"), self._number("Q")
        self._check_count("fields of metadata", field_count, _SHORTEST_FIELD)
        self._check_count("tensors", tensor_count, _SHORTEST_TENSOR)
        metadata = dict(self._read_fields(int(field_count)))
        if len(metadata) < field_count:
            raise FileError(f"{self._path}: a field of the metadata is there twice")
        described = [self._read_tensor(number) for number in range(int(tensor_count))]
        alignment = self._alignment(metadata)
        data_start = -(-self._at // alignment) * alignment
        tensors = {tensor.name: tensor for tensor in self._placed(described, data_start, alignment)}
        if len(tensors) < tensor_count:
            raise FileError(f"{self._path}: two tensors have the same name")
        return GgufFile(self._path, (self._path,), metadata, tensors)

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise FileError(f"{self._path}: general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _read_fields(self, count: int) -> Iterable[tuple[str, Value]]:
        for number in range(count):
            self._field = f"the name of field {number} of {count}"
            name = self._string()
            self._field = f"the field '{shown(name)}'"
            yield name, self._value(int(self._number("I")))

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._number(self._letter(kind))

    def _array(self) -> Value:
        kind, count = int(self._number("I")), int(self._number("Q"))
        if kind == _ARRAY:
            raise FileError(f"{self._path}: {self._field} is an array of arrays, which no model has")
        if kind == _STRING:
            self._check_count("strings", count, 8)
            return self._strings(count)
        letter = self._letter(kind).replace("?", "B")
        self._check_count("numbers", count, struct.calcsize("<" + letter))
        numbers: array[int] | array[float] = array(letter, self._bytes(count * struct.calcsize("<" + letter)))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _letter(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise FileError(
                f"{self._path}: {self._field} has a value of type {kind}, which GGUF does not have"
            )
        return _NUMBERS[kind]

    def _number(self, letter: str) -> int | float | bool:
        return struct.unpack("<" + letter, self._bytes(struct.calcsize("<" + letter)))[0]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Read so many strings, of which a vocabulary has hundreds of thousands: hence a loop without calls.

        Some converters cut names of tokens within a character; these are read with a sign for what is lost.
        """
        data, at, end = self._data, self._at, self._end
        found: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > end:
                raise self._too_short(at)
            found.append(str(data[start:at], "utf-8", "replace"))
        self._at = at
        return found

    def _bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > self._end:
            raise self._too_short(self._at)
        return self._data[start : self._at]

    def _check_count(self, what: str, count: float, nbytes: int) -> None:
        """Refuse a count of things of at least so many bytes for which the file has no room."""
        if count * nbytes > self._end - self._at:
            raise FileError(
                f"{self._path}: {self._field} says {count:g} {what}, for which the file is too short; it is "
                "cut off or broken: download it again"
            )

    def _too_short(self, wanted: float) -> FileError:
        why = f"ends at byte {self._size}" if self._end == self._size else "may have no such header"
        return FileError(
            f"{self._path}: {self._field} reaches up to byte {wanted:g}, but the file {why}; it is cut off "
            "or broken: download it again"
        )

    def _read_tensor(self, number: int) -> _Described:
        self._field = f"the name of tensor {number}"
        name = self._string()
        self._field = f"the tensor {shown(name)}"
        dimensions = int(self._number("I"))
        if dimensions > _MOST_DIMENSIONS:
            raise FileError(f"{self._path}: {self._field} has {dimensions} dimensions, but GGML has four")
        sizes = struct.unpack(f"<{dimensions}Q", self._bytes(8 * dimensions))
        kind, offset = struct.unpack("<IQ", self._bytes(12))
        return _Described(name, sizes[::-1], kind, offset)

    def _placed(
        self, described: Iterable[_Described], data_start: int, alignment: int
    ) -> Iterable[GgufTensor]:
        """Find the bytes of each tensor, all of which must lie in the file."""
        for one in described:
            where = f"{self._path}: the tensor {shown(one.name)}"
            if one.kind not in GGML_TYPES:
                what = f"was stored as {REMOVED[one.kind]}" if one.kind in REMOVED else f"has type {one.kind}"
                raise FileError(f"{where} {what}, which is not read; convert the model again")
            block = GGML_TYPES[one.kind]
            row = one.shape[-1] if one.shape else 1
            if row % block.numbers:
                raise FileError(f"{where} has rows of {row}, but {block.name} has blocks of {block.numbers}")
            nbytes = prod(one.shape) // block.numbers * block.nbytes
            if one.offset % alignment:
                raise FileError(f"{where} begins at {one.offset}, which is not a multiple of {alignment}")
            start = data_start + one.offset
            if start + nbytes > self._size:
                raise FileError(
                    f"{where} lies up to byte {start + nbytes:g}, but the file ends at byte {self._size}; it "
                    "is cut off: download it again"
                )
            yield GgufTensor(one.name, one.shape, block.name, self._path, start, nbytes)


@dataclass(frozen=True)
class _Described:
    """The header's entry for a tensor."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
