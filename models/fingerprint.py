"""A digest of a checkpoint's weights that takes milliseconds: headers and samples, never whole files."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from models.checkpoint.files import weight_files
from models.gguf.folder import gguf_parts

_PIECES, _PIECE_BYTES = 4, 64
"""Pieces that are read of each tensor, spread evenly over it, and their size."""


def digest_weights(folder: Path, load_format: str, seed: int) -> str:
    """A digest of names, types, shapes and samples of all tensors; of dummy weights, the seed.

    A change of a few elements that are no sample goes unseen: to see all would take as long as to load them.
    """
    if load_format == "dummy":
        return f"dummy {seed}"
    digest = hashlib.sha256()
    for path in gguf_parts(folder) or weight_files(folder, load_format):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for found in _zipped(path) if zipfile.is_zipfile(path) else _sampled(path):
            digest.update(found)
    return digest.hexdigest()


def _zipped(path: Path) -> Iterator[bytes]:
    """The names and checksums of the parts of a file as torch.save writes it."""
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            yield f"{part.filename} {part.file_size} {part.CRC}\n".encode()


def _sampled(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file and pieces of each tensor; or pieces of a file without a header."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        header = _header(file.fileno(), size)
        yield header
        for start, stop in _tensors(header, size):
            last = max(start, stop - _PIECE_BYTES)
            for place in {start + (last - start) * i // (_PIECES - 1) for i in range(_PIECES)}:
                yield os.pread(file.fileno(), min(_PIECE_BYTES, stop - place), place)


def _header(file: int, size: int) -> bytes:
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0).ljust(8, b"\0"))
    return os.pread(file, length, 8) if length < size else b""


def _tensors(header: bytes, size: int) -> Iterator[tuple[int, int]]:
    """The first and last offsets of tensors in a safetensors file; without a header, those of the file."""
    try:
        described = json.loads(header)
        offsets = [entry["data_offsets"] for name, entry in described.items() if name != "__metadata__"]
    except (ValueError, KeyError, AttributeError, TypeError):
        yield 0, size
        return
    for start, stop in offsets:
        yield 8 + len(header) + start, 8 + len(header) + stop
