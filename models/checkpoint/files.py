"""The files of a checkpoint: the tensors that they hold, and ways to read a piece of one.

This module knows file formats only; `weights.py` knows which tensor is wanted, in what dtype and where.
"""

from __future__ import annotations

import textwrap
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoint.damage import find_fault
from models.plain_files import FileError, check_regular, lies_within, read_json, shown
from models.plugins import model_loader
from models.weight_slices import Cut, WeightsError


def load_tensors(loader: Callable[[Any], Any], folder: Path, load_format: str) -> Mapping[str, Tensor]:
    """All tensors that a loader finds in a folder, as vLLM's loaders are called. Raises WeightsError."""
    tensors: dict[str, Tensor] = {}

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        found = dict(weights)
        tensors.update(found)
        return set(found)

    model, place = SimpleNamespace(load_weights=load_weights), SimpleNamespace(model=str(folder))
    try:
        loader(SimpleNamespace(load_format=load_format)).load_weights(model, place)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise WeightsError(f"--load-format {load_format}: its loader failed for {folder}: {why}") from error
    if not tensors:
        raise WeightsError(f"--load-format {load_format}: its loader has found no tensors in {folder}")
    return tensors


HOST = torch.device("cpu")
_LONGEST_REASON = 100


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint that is not read yet."""

    shape: tuple[int, ...]
    dtype: str
    """The type of its numbers as torch names it, or as the file does if torch has no such type."""
    file: str
    read: Callable[[Cut | None], Tensor]

    @property
    def elements(self) -> int:
        return prod(self.shape)


CONVERTED_AT_ONCE = 16 << 20
"""Bytes of a stored tensor that are converted before the next ones are read."""


Upload = Callable[[Tensor, torch.dtype, Callable[[float], None]], Tensor]
"""The type of a function that brings a tensor that was read to a device and to a number type.

A large one is brought piece by piece. The last argument is called after each with the fraction that is done,
and may give its pages of the file back: so memory holds the result and one piece, and not the tensor twice.
"""


def convert(
    device: torch.device, read: Tensor, dtype: torch.dtype, report: Callable[[float], None]
) -> Tensor:
    """Bring a tensor that was read to this device and number type, as an `Upload` does."""
    if (read.device, read.dtype) == (device, dtype) or read.nbytes <= CONVERTED_AT_ONCE:
        tensor = read.to(device=device, dtype=dtype)
        report(1.0)
        return tensor
    tensor = torch.empty(read.shape, device=device, dtype=dtype)
    rows = max(1, len(read) * CONVERTED_AT_ONCE // read.nbytes)
    for start in range(0, len(read), rows):
        stop = min(start + rows, len(read))
        tensor[start:stop] = read[start:stop]
        report(stop / len(read))
    return tensor


@dataclass
class Source:
    """A checkpoint's tensors by name, wherever they come from."""

    place: str
    """The source as messages name it behind the word "in"."""
    tensors: Mapping[str, Stored]

    def find(self, name: str, shape: tuple[int, ...], kinds: Sequence[str]) -> Stored | None:
        """Find the tensor of that name. The model expects this shape and one of these number types, but the
        tensor may have others."""
        return self.tensors.get(name)

    @property
    def types(self) -> Mapping[str, str]:
        """The number types of tensors by their names, as far as they are known."""
        return {name: stored.dtype for name, stored in self.tensors.items()}


def place_of(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


_DUMMY_VALUES = 100_003
"""Dummy tensors repeat so many values, for to draw all takes minutes. The number is prime, so rows differ."""


class Dummy(Source):
    """Weights that do not exist: any tensor has small random values, by its name and the seed.

    Tensors of whole numbers have any, because they are codes, and scales are positive. For models
    that are never run, only shapes exist.
    """

    def __init__(
        self, seed: int, device: torch.device = HOST, types: Mapping[str, str] | None = None
    ) -> None:
        """`device`: the one that draws values, where they stay. Each kind of device draws others.

        `types`: the number types of a checkpoint's tensors; with them, only shapes exist, and on "meta".
        """
        super().__init__("dummy weights", {})
        self._seed = seed
        self._device = device
        self._types = types

    @property
    def types(self) -> Mapping[str, str]:
        return self._types or {}

    def find(self, name: str, shape: tuple[int, ...], kinds: Sequence[str]) -> Stored:
        def read(cut: Cut | None) -> Tensor:
            size = list(shape) if cut is None else cut.shape_of(shape)
            if self._types is not None:
                return torch.empty(size, dtype=dtype, device="meta")
            # The cut is part of the name, so that ranks that hold the same piece hold the same values.
            seed = zlib.crc32(f"{self._seed} {name} {cut}".encode())
            count = prod(size)
            values = _dummy_values(min(count, _DUMMY_VALUES), dtype, "scale" in name, seed, self._device)
            return values.repeat(-(-count // _DUMMY_VALUES))[:count].view(size)

        stored = self.types.get(name, "")
        kind = stored if stored in kinds else kinds[0]
        dtype = cast("torch.dtype", getattr(torch, kind))
        return Stored(shape, kind, self.place, read)


def _dummy_values(count: int, dtype: torch.dtype, positive: bool, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return torch.randint(low, high, (count,), generator=generator, dtype=dtype, device=device)
    low, high = (1e-3, 4e-3) if positive else (-0.05, 0.05)
    return torch.empty(count, device=device).uniform_(low, high, generator=generator).to(dtype)


def open_source(folder: Path, load_format: str, seed: int = 0, device: torch.device = HOST) -> Source:
    """Open a checkpoint, or dummy weights, of which `seed` and `device` decide the values.

    A layer that lies beside a checkpoint in a file of its own is named itself, in place of a folder.
    """
    if load_format != "dummy" and folder.suffix in _FILES:
        return Source(folder.name, _FILES[folder.suffix](folder))
    if load_format not in _NAMES and (loader := model_loader(load_format)) is not None:
        found = load_tensors(loader, folder, load_format)
        return Source(f"what {load_format} reads", {n: _stored_tensor(t, n) for n, t in found.items()})
    if load_format != "dummy":
        return _open(folder, _format(folder, load_format))
    return Dummy(seed, device, {} if device.type == "meta" else None)


def weight_files(folder: Path, load_format: str) -> list[Path]:
    """List the files of a checkpoint that `open_source` reads; of one that a registered loader reads, all."""
    if load_format not in _NAMES and model_loader(load_format) is not None:
        return sorted(path for path in folder.iterdir() if path.is_file())
    return _list(folder, _format(folder, load_format)).files


_NAMES = ("auto", "safetensors", "mistral", "pt", "dummy")


def _format(folder: Path, load_format: str) -> _Format:
    match load_format:
        case "auto" | "safetensors" | "mistral":
            return _SAFETENSORS
        case "pt":
            return _PT
        case _:
            raise WeightsError(
                f"load_format is {load_format!r}, but must be one of auto, safetensors, pt, dummy; a GGUF "
                "file is named itself"
            )


@dataclass(frozen=True)
class _Format:
    """The names of a format's files, and the function that reads one of them."""

    single: str
    index: str
    patterns: tuple[str, ...]
    """The names of files where there is no index. Those that match the first one count, if there are any."""
    read: Callable[[Path], dict[str, Stored]]


@dataclass(frozen=True)
class _Listing:
    """The weight files of a folder."""

    files: list[Path]
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    """The file of each tensor, if there is an index."""


def _open(folder: Path, format: _Format) -> Source:
    listing = _list(folder, format)
    tensors: dict[str, Stored] = {}
    for path in listing.files:
        for name, stored in format.read(path).items():
            right = PurePath(listing.places.get(name, "")).name
            if name not in tensors or right == stored.file:
                tensors[name] = stored
            elif right != tensors[name].file:
                both = f"{tensors[name].file} and in {stored.file}"
                raise WeightsError(
                    f"{shown(name)} lies in {both}, and no {format.index} says which counts: remove one"
                )
    return Source(place_of([path.name for path in listing.files]), tensors)


def _list(folder: Path, format: _Format) -> _Listing:
    """List the files by the index, if there is one: some folders hold the same weights twice."""
    index, single = folder / format.index, folder / format.single
    if index.exists():
        listing = _read_index(index)
        gone = listing.files and not any(path.exists() for path in listing.files)
        if gone and single.exists():
            listing = _Listing([single])  # the index is left of an earlier save
    elif single.exists():
        listing = _Listing([single])
    else:
        listing = _Listing(_matching(folder, format))
    if not listing.files:
        raise WeightsError(_no_files(folder, format))
    for path in listing.files:
        if not path.exists():
            known = f"named in {format.index}" if listing.places else "a link"
            raise WeightsError(f"{path}: {known}, but there is no such file")
        try:
            check_regular(path)
        except FileError as error:
            raise WeightsError(str(error)) from None
    return listing


def _matching(folder: Path, format: _Format) -> list[Path]:
    """The files with weights by their names alone."""
    others = {folder / name for name in _OF_TRAINING}
    return next(filter(None, (sorted({*folder.glob(each)} - others) for each in format.patterns)), [])


def _read_index(index: Path) -> _Listing:
    try:
        content = read_json(index)
    except FileError as error:
        raise WeightsError(str(error)) from None
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise WeightsError(f"{index}: not an index of weight files: 'weight_map' must name a file per tensor")
    places = cast("dict[str, str]", places)
    for tensor, file in places.items():
        if not file or not lies_within(file):
            raise WeightsError(
                f"{index}: {shown(tensor)} is said to lie in {file!r}, outside of the model's folder"
            )
    return _Listing([index.parent / file for file in sorted(set(places.values()))], places)


def _no_files(folder: Path, format: _Format) -> str:
    if format is _SAFETENSORS and (pickles := _matching(folder, _PT)):
        return (
            f"{folder} holds its weights as *{pickles[0].suffix} only. Such files are pickles, and are read "
            "only if you ask for it: add --load-format pt, or convert them to safetensors."
        )
    return f"{folder} holds no weights: no {format.single}, {format.index} or {' or '.join(format.patterns)}"


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Map the file: nothing is read before a slice is asked for, and a whole tensor is never copied."""
    try:
        file = safe_open(path, framework="pt")  # pyright: ignore[reportCallIssue]
        return {name: _stored_slice(file.get_slice(name), path.name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, OverflowError) as error:
        fault = find_fault(path) or _first_sentence(error)
        raise WeightsError(f"{path}: not a whole safetensors file: {fault}") from error


_SAFETENSORS_TYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}


def _stored_slice(piece: Any, file: str) -> Stored:
    def read(cut: Cut | None) -> Tensor:
        return piece[...] if cut is None else cut.of(piece)

    dtype = str(piece.get_dtype())
    return Stored(tuple(piece.get_shape()), _SAFETENSORS_TYPES.get(dtype, dtype), file, read)


def _first_sentence(error: Exception) -> str:
    """What another library says of a file, without its advice, which is for its own callers."""
    return textwrap.shorten(str(error).partition(". ")[0], _LONGEST_REASON, placeholder=" ...")


def _read_pt(path: Path) -> dict[str, Stored]:
    try:
        # Files of torch before 1.6 are no zip archives, and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch.load has no error class of its own
        raise WeightsError(f"{path}: not a file of tensors: {_first_sentence(error)}") from error
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

    kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
    return Stored(tuple(tensor.shape), str(kind).removeprefix("torch."), file, read)


_SAFETENSORS = _Format(
    "model.safetensors", "model.safetensors.index.json", ("*.safetensors",), read_safetensors
)
_PT = _Format("pytorch_model.bin", "pytorch_model.bin.index.json", ("*.bin", "*.pt"), _read_pt)
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Pickles without weights, which trainers leave beside them."""

_FILES = {".safetensors": read_safetensors, ".pt": _read_pt}
"""The ways to read one file. A pickle is read as tensors only here, too."""
