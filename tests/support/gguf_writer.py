"""Writes GGUF files byte by byte, as the format's document describes them, without the code under test."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_PACKED = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q"}
_PACKED |= {F64: "d"}


@dataclass(frozen=True)
class Typed:
    """A value of the metadata with the type that it is written as; `of` is that of an array's elements."""

    kind: int
    value: object
    of: int = -1


@dataclass(frozen=True)
class Blob:
    """A tensor: its name, its shape as torch has it, GGML's number of its coding, and its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: bytes


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def typed(value: object) -> Typed:
    """The type that llama.cpp's converter would choose."""
    match value:
        case Typed():
            return value
        case bool():
            return Typed(BOOL, value)
        case int():
            return Typed(U32, value)
        case float():
            return Typed(F32, value)
        case str() | bytes():
            return Typed(STRING, value)
        case [str() | bytes(), *_]:
            return Typed(ARRAY, value, STRING)
        case [bool(), *_]:
            return Typed(ARRAY, value, BOOL)
        case [float(), *_]:
            return Typed(ARRAY, value, F32)
        case list():
            return Typed(ARRAY, value, I32)
        case _:
            raise TypeError(type(value))


def _one(kind: int, value: object) -> bytes:
    if kind == STRING:
        assert isinstance(value, str | bytes)
        return string(value)
    return struct.pack("<" + _PACKED[kind], value)


def field(name: str, value: object) -> bytes:
    """A field of the metadata: its name, its type and its value."""
    one = typed(value)
    head = string(name) + struct.pack("<I", one.kind)
    if one.kind != ARRAY:
        return head + _one(one.kind, one.value)
    assert isinstance(one.value, list)
    body = b"".join(_one(one.of, each) for each in one.value)
    return head + struct.pack("<IQ", one.of, len(one.value)) + body


def write_gguf(
    path: Path,
    fields: Mapping[str, object],
    tensors: Sequence[Blob] = (),
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    if alignment != 32:
        fields = {**fields, "general.alignment": alignment}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    head += b"".join(field(name, value) for name, value in fields.items())
    data = b""
    for blob in tensors:
        head += string(blob.name) + struct.pack("<I", len(blob.shape))
        head += struct.pack(f"<{len(blob.shape)}Q", *reversed(blob.shape))  # GGML begins with the innermost
        head += struct.pack("<IQ", blob.kind, len(data))
        data += blob.data + bytes(-len(blob.data) % alignment)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path
