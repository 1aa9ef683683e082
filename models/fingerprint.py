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
from models.ctranslate2.folder import made_weights
from models.gguf.folder import gguf_parts

_PIECES, _PIECE_BYTES = 4, 64
"""Pieces that are read of each tensor, spread evenly over it, and their size."""


def digest_weights(folder: Path, load_format: str, seed: int) -> str:
    """A digest of names, types, shapes and samples of all tensors, however they are spread over files; of
    dummy weights, the seed.

    A change of a few elements that are no sample goes unseen: to see all would take as long as to load them.
    """
    if load_format == "dummy":
        return f"dummy {seed}"
    files = [folder] if folder.is_file() else gguf_parts(folder) or made_weights(folder)
    files = files or weight_files(folder, load_format)
    found = [one for path in files for one in (_zipped(path) if zipfile.is_zipfile(path) else _sampled(path))]
    digest = hashlib.sha256()
    for one in sorted(found):
        digest.update(len(one).to_bytes(8, "little") + one)
    return digest.hexdigest()


def _zipped(path: Path) -> Iterator[bytes]:
    """The names and checksums of the parts of a file as torch.save writes it."""
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            yield f"{path.name} {part.filename} {part.file_size} {part.CRC}".encode()


def _sampled(path: Path) -> Iterator[bytes]:
    """The name and pieces of each tensor of a safetensors file; of another file, its size and pieces."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        header = _header(file.fileno(), size)
        tensors = _tensors(header) or {f"{path.name} {size}": (0, size)}
        for told, (start, stop) in tensors.items():
            last = max(start, stop - _PIECE_BYTES)
            places = sorted({start + (last - start) * i // (_PIECES - 1) for i in range(_PIECES)})
            pieces = [os.pread(file.fileno(), min(_PIECE_BYTES, stop - place), place) for place in places]
            yield told.encode() + b"".join(pieces)


def _header(file: int, size: int) -> bytes:
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0).ljust(8, b"\0"))
    return os.pread(file, length, 8) if length < size else b""


def _tensors(header: bytes) -> dict[str, tuple[int, int]]:
    """The name, type and shape of each tensor of a safetensors file, with its first and last offsets; nothing
    if this is no such header."""
    try:
        described = json.loads(header)
        first = 8 + len(header)
        return {
            f"{name} {entry['dtype']} {entry['shape']} ": (
                first + entry["data_offsets"][0],
                first + entry["data_offsets"][1],
            )
            for name, entry in described.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, AttributeError, TypeError, IndexError):
        return {}
