"""Reads the one tensor of a file that `torch.save`, safetensors or `numpy.save` wrote, without torch.

A file of `torch.save` is a zip archive. Its `data.pkl` is a pickle, which is a program: it is never run, but
compared opcode by opcode with what torch writes of one tensor, and the type, shape and place of the values
are taken from its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from io import BytesIO
from math import prod
from pickletools import genops
from zipfile import ZIP_STORED, ZipFile

import numpy as np

_BFLOAT16 = "<u2"
"""NumPy has no bfloat16: its bits are read as whole numbers."""
_INTEGER = "<i8"
_STORAGES = {
    "torch FloatStorage": "<f4",
    "torch HalfStorage": "<f2",
    "torch BFloat16Storage": _BFLOAT16,
    "torch LongStorage": _INTEGER,
}
_SAFETENSORS = {"F32": "<f4", "F16": "<f2", "BF16": _BFLOAT16, "I64": _INTEGER}
_NUMPY = ("<f4", "<f2", _INTEGER)
_MOST_HEADER = 4096
"""The most bytes of what describes the tensor: torch writes some 200, and safetensors some 100."""
_MOST_ENTRIES = 16
"""The most entries of an archive, of which torch writes up to 8."""

_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")
_SAME = {**dict.fromkeys(_INTEGERS, "INT"), "NEWFALSE": "BOOL", "NEWTRUE": "BOOL"}
_MEMO = ("BINPUT", "LONG_BINPUT")
_SHAPES = "|".join(2 * f"{'INT ' * count}TUPLE{count} " for count in (1, 2, 3))
_TENSOR = re.compile(
    "PROTO GLOBAL MARK MARK BINUNICODE GLOBAL BINUNICODE BINUNICODE INT TUPLE BINPERSID INT "
    f"({_SHAPES})BOOL GLOBAL EMPTY_TUPLE REDUCE TUPLE REDUCE STOP"
)
"""The opcodes of the pickle of a tensor of up to three dimensions: what rebuilds it, its storage, offset,
shape and strides, whether it has a gradient, and its hooks, which are none."""


def read_matrix(file: bytes) -> np.ndarray:
    """The values [rows, columns] of a file's only tensor, or of a batch of one, as float32. Raises what
    `read_tensor` does."""
    found = without_batch(read_tensor(file))
    if found.ndim != 2 or found.dtype != np.float32:
        raise ValueError("the tensor is not a matrix of floats")
    return found


def read_tensor(file: bytes) -> np.ndarray:
    """The values of a file's only tensor, as float32, or as int64 if they are. Raises ValueError, or whatever
    libraries raise for broken files."""
    if file.startswith(b"PK\3\4"):
        return _read_torch(file)
    return _read_numpy(file) if file.startswith(np.lib.format.MAGIC_PREFIX) else _read_safetensors(file)


def without_batch(values: np.ndarray) -> np.ndarray:
    """The only one of a batch of matrices; other values as they are."""
    return values[0] if values.ndim == 3 and len(values) == 1 else values


def is_matrix(rows: np.ndarray | None, width: int) -> bool:
    """Whether these are finite numbers in rows of this width."""
    return rows is not None and rows.ndim == 2 and rows.shape[1] == width and bool(np.isfinite(rows).all())


def _read_torch(file: bytes) -> np.ndarray:
    if file.count(b"PK\1\2") > _MOST_ENTRIES:
        raise ValueError("too many entries")
    with ZipFile(BytesIO(file)) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}

        def read(name: str) -> bytes:
            entry = entries[name]
            if entry.compress_type != ZIP_STORED or entry.file_size > len(file):
                raise ValueError("an entry is compressed, or larger than the file")
            return archive.read(entry)

        if "byteorder" in entries and read("byteorder") != b"little":
            raise ValueError("the bytes are in another order")
        ops = [
            (op.name, arg) for op, arg, _ in genops(read("data.pkl")[:_MOST_HEADER]) if op.name not in _MEMO
        ]
        if not _TENSOR.fullmatch(" ".join(_SAME.get(name, name) for name, _ in ops)):
            raise ValueError("the pickle is not that of a tensor")
        _, rebuild, word, storage, key, _, _, *numbers, hooks = [arg for _, arg in ops if arg is not None]
        offset, *sizes = numbers
        shape, steps = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        names = (rebuild, word, hooks)
        if names != ("torch._utils _rebuild_tensor_v2", "storage", "collections OrderedDict"):
            raise ValueError("the pickle calls something else")
        sides = enumerate(zip(shape, steps, strict=True), 1)
        if any(size != 1 and step != prod(shape[number:]) for number, (size, step) in sides):
            raise ValueError("the values do not lie one behind the other")
        return _values(read(f"data/{key}"), _STORAGES[storage], shape, offset)


def _read_numpy(file: bytes) -> np.ndarray:
    stream = BytesIO(file)
    first = np.lib.format.read_magic(stream) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, by_column, kind = read(stream, max_header_size=_MOST_HEADER)
    if by_column or kind.str not in _NUMPY:
        raise ValueError("the values are of another kind, or lie in another order")
    return _values(file[stream.tell() :], kind.str, shape)


def _read_safetensors(file: bytes) -> np.ndarray:
    size = int.from_bytes(file[:8], "little")
    if size > _MOST_HEADER:
        raise ValueError("the header is too long")
    header = json.loads(file[8 : 8 + size])
    header.pop("__metadata__", None)
    [tensor] = header.values()
    first, stop = tensor["data_offsets"]
    return _values(file[8 + size :][first:stop], _SAFETENSORS[tensor["dtype"]], tensor["shape"])


def _values(data: bytes, kind: str, shape: Sequence[int], offset: int = 0) -> np.ndarray:
    """The values of a storage from `offset` on."""
    found = np.frombuffer(data, kind, prod(shape), offset * np.dtype(kind).itemsize)
    if kind == _BFLOAT16:
        found = (found.astype(np.uint32) << 16).view(np.float32)
    found = found.reshape(shape)
    return found if kind == _INTEGER else found.astype(np.float32, copy=False)
