"""The files of a checkpoint: the tensors that they hold, and ways to read a piece of one.

This module knows file formats only; `weights.py` knows which tensor is wanted, in what dtype and where.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class WeightsError(ValueError):
    """The checkpoint's weights cannot be used; the message names file, tensor and reason."""


@dataclass(frozen=True)
class Cut:
    """The piece [start, stop) along one of the two dimensions of a matrix, or along a vector."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: Any) -> Tensor:
        """Cut the piece out of a tensor, or out of a slice of safetensors, which reads no more than that."""
        return tensor[self.start : self.stop] if self.dim == 0 else tensor[:, self.start : self.stop]


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint that is not read yet."""

    shape: tuple[int, ...]
    file: str
    read: Callable[[Cut | None], Tensor]

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Source(Protocol):
    """A checkpoint's tensors by name, wherever they come from."""

    place: str
    """The name of the source in messages."""
    tensors: Mapping[str, Stored]

    def find(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        """Find the tensor of that name. The model expects this shape, but the tensor may have another."""
        ...


class Files:
    """A checkpoint on disk."""

    def __init__(self, place: str, tensors: Mapping[str, Stored]) -> None:
        self.place = place
        self.tensors = tensors

    def find(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        return self.tensors.get(name)


_DUMMY_VALUES = 100_003
"""Dummy tensors repeat so many values, for to draw all takes minutes. The number is prime, so rows differ."""


class Dummy:
    """Weights that do not exist: any tensor has small random values, by its name and the seed."""

    place = "dummy weights"
    tensors: Mapping[str, Stored] = {}

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find(self, name: str, shape: tuple[int, ...]) -> Stored:
        def read(cut: Cut | None) -> Tensor:
            # The cut is part of the name, so that ranks that hold the same piece hold the same values.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name} {cut}".encode()))
            size = list(shape)
            if cut is not None:
                size[cut.dim] = cut.stop - cut.start
            count = prod(size)
            values = torch.empty(min(count, _DUMMY_VALUES)).uniform_(-0.05, 0.05, generator=generator)
            return values.repeat(-(-count // _DUMMY_VALUES))[:count].view(size)

        return Stored(shape, self.place, read)


def open_source(folder: Path, load_format: str, seed: int = 0) -> Source:
    return Dummy(seed) if load_format == "dummy" else _open(folder, _format(load_format))


def weight_files(folder: Path, load_format: str) -> list[Path]:
    """List the files of a checkpoint that `open_source` reads."""
    return _files(folder, _format(load_format))


def _format(load_format: str) -> _Format:
    match load_format:
        case "auto" | "safetensors":
            return _SAFETENSORS
        case "pt":
            return _PT
        case _:
            raise WeightsError(
                f"load_format is {load_format!r}, but must be one of auto, safetensors, pt, dummy"
            )


@dataclass(frozen=True)
class _Format:
    """The names of a format's files, and the function that reads one of them."""

    single: str
    index: str
    pattern: str
    read: Callable[[Path], dict[str, Stored]]


def _open(folder: Path, format: _Format) -> Files:
    tensors: dict[str, Stored] = {}
    for path in _files(folder, format):
        tensors |= format.read(path)
    return Files(str(folder), tensors)


def _files(folder: Path, format: _Format) -> list[Path]:
    """List the files by the index, if there is one: some folders hold the same weights twice."""
    index = folder / format.index
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index}: not an index of weight files: {error}") from error
        files = [folder / name for name in names]
    elif (folder / format.single).is_file():
        files = [folder / format.single]
    else:
        files = sorted(folder.glob(format.pattern))
    if not files:
        raise WeightsError(_no_files(folder, format))
    for path in files:
        if not path.is_file():
            raise WeightsError(f"{path}: named in {format.index}, but there is no such file")
    return files


def _no_files(folder: Path, format: _Format) -> str:
    if format is _SAFETENSORS and any(folder.glob(_PT.pattern)):
        return (
            f"{folder} holds its weights as {_PT.pattern} only. Such files are pickles, and are read only if "
            "you ask for it: add --load-format pt, or convert them to safetensors."
        )
    return f"{folder} holds no weights: no {format.single}, {format.index} or {format.pattern}"


def _read_safetensors(path: Path) -> dict[str, Stored]:
    """Map the file: nothing is read before a slice is asked for, and a whole tensor is never copied."""
    try:
        file = safe_open(path, framework="pt")  # pyright: ignore[reportCallIssue]
        return {name: _stored_slice(file.get_slice(name), path.name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a whole safetensors file: {error}") from error


def _stored_slice(piece: Any, file: str) -> Stored:
    def read(cut: Cut | None) -> Tensor:
        return piece[...] if cut is None else cut.of(piece)

    return Stored(tuple(piece.get_shape()), file, read)


def _read_pt(path: Path) -> dict[str, Stored]:
    try:
        # Files of torch before 1.6 are no zip archives, and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch.load has no error class of its own
        raise WeightsError(f"{path}: not a file of tensors: {error}") from error
    if not isinstance(state, dict):
        raise WeightsError(f"{path}: holds a {type(state).__name__}, not a dictionary of tensors")
    return {
        str(name): _stored_tensor(tensor, path.name)
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
    }


def _stored_tensor(tensor: Tensor, file: str) -> Stored:
    def read(cut: Cut | None) -> Tensor:
        return tensor if cut is None else cut.of(tensor)

    return Stored(tuple(tensor.shape), file, read)


_SAFETENSORS = _Format(
    "model.safetensors", "model.safetensors.index.json", "*.safetensors", _read_safetensors
)
_PT = _Format("pytorch_model.bin", "pytorch_model.bin.index.json", "*.bin", _read_pt)
