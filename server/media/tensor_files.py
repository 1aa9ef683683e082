"""Reads the one matrix of a file that `torch.save` or safetensors wrote, without torch.

A file of `torch.save` is a zip archive. Its `data.pkl` is a pickle, which is a program: it is never run, but
compared opcode by opcode with what torch writes of one tensor, and the type, shape and place of the values
are taken from its arguments.
"""

from __future__ import annotations

import json
from io import BytesIO
from pickletools import genops
from zipfile import ZIP_STORED, ZipFile

import numpy as np

_BFLOAT16 = "<u2"
"""NumPy has no bfloat16: its bits are read as whole numbers."""
_STORAGES = {"torch FloatStorage": "<f4", "torch HalfStorage": "<f2", "torch BFloat16Storage": _BFLOAT16}
_SAFETENSORS = {"F32": "<f4", "F16": "<f2", "BF16": _BFLOAT16}
_MOST_HEADER = 4096
"""The most bytes of what describes the tensor: torch writes some 200, and safetensors some 100."""
_MOST_ENTRIES = 16
"""The most entries of an archive, of which torch writes up to 8."""

_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")
_SAME = {**dict.fromkeys(_INTEGERS, "INT"), "NEWFALSE": "BOOL", "NEWTRUE": "BOOL"}
_MEMO = ("BINPUT", "LONG_BINPUT")
_MATRIX = (
    "PROTO GLOBAL MARK MARK BINUNICODE GLOBAL BINUNICODE BINUNICODE INT TUPLE BINPERSID INT INT INT TUPLE2 "
    "INT INT TUPLE2 BOOL GLOBAL EMPTY_TUPLE REDUCE TUPLE REDUCE STOP"
)
"""The opcodes of the pickle of a tensor of two dimensions: what rebuilds it, its storage, offset, shape and
strides, whether it has a gradient, and its hooks, which are none."""


def read_matrix(file: bytes) -> np.ndarray:
    """The values of a file's only tensor, as float32. Raises ValueError, or whatever libraries raise for
    broken files."""
    return _read_torch(file) if file.startswith(b"PK\3\4") else _read_safetensors(file)


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
        if " ".join(_SAME.get(name, name) for name, _ in ops) != _MATRIX:
            raise ValueError("the pickle is not that of a matrix")
        _, rebuild, word, storage, key, _, _, *numbers, hooks = [arg for _, arg in ops if arg is not None]
        offset, rows, columns, row_step, step = numbers
        names = (rebuild, word, hooks)
        if names != ("torch._utils _rebuild_tensor_v2", "storage", "collections OrderedDict"):
            raise ValueError("the pickle calls something else")
        if step != 1 or (row_step != columns and rows != 1):
            raise ValueError("the values do not lie one behind the other")
        return _values(read(f"data/{key}"), _STORAGES[storage], offset, rows, columns)


def _read_safetensors(file: bytes) -> np.ndarray:
    size = int.from_bytes(file[:8], "little")
    if size > _MOST_HEADER:
        raise ValueError("the header is too long")
    header = json.loads(file[8 : 8 + size])
    header.pop("__metadata__", None)
    [tensor] = header.values()
    (first, stop), (rows, columns) = tensor["data_offsets"], tensor["shape"]
    return _values(file[8 + size :][first:stop], _SAFETENSORS[tensor["dtype"]], 0, rows, columns)


def _values(data: bytes, kind: str, offset: int, rows: int, columns: int) -> np.ndarray:
    """The values [rows, columns] of a storage from `offset` on, as float32."""
    found = np.frombuffer(data, kind, rows * columns, offset * np.dtype(kind).itemsize)
    if kind == _BFLOAT16:
        found = (found.astype(np.uint32) << 16).view(np.float32)
    return found.reshape(rows, columns).astype(np.float32, copy=False)
