"""Finds files of weights that are damaged: their header does not fit them, or numbers are not finite."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from models.plain_files import shown
from models.weight_slices import DAMAGED, WeightsError

_MOST_HEADER_BYTES = 100_000_000
"""The longest header that the library reads."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The first 40 bytes of what Git checks out for a large file while Git LFS is not installed."""

_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


def find_fault(path: Path) -> str | None:
    """A clause on what is wrong: the file is Git's stand-in for itself, or a tensor cannot lie in it as the
    header says; None if neither is so."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if (start := file.read(8)) == _LFS_POINTER[:8] and start + file.read(32) == _LFS_POINTER:
                return "it is a pointer of Git LFS, and `git lfs pull` in its folder fetches the file itself"
            length = int.from_bytes(start, "little")
            described = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(described, dict):
        return None
    tensors = {name: entry for name, entry in described.items() if name != "__metadata__"}
    if odd := next((name for name, entry in tensors.items() if not _is_entry(entry)), None):
        return f"its header does not describe {shown(odd)} with a type, a shape and two offsets"
    return _find_misplaced(cast("Mapping[str, Mapping[str, object]]", tensors), size - 8 - length)


def _is_entry(entry: object) -> bool:
    match entry:
        case {"dtype": str(), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            return start >= 0 and stop >= 0 and all(isinstance(n, int) and n >= 0 for n in shape)
        case _:
            return False


def _find_misplaced(tensors: Mapping[str, Mapping[str, object]], data_bytes: int) -> str | None:
    places = {name: cast("list[int]", entry["data_offsets"]) for name, entry in tensors.items()}
    ordered = sorted(places.items(), key=lambda item: item[1])
    for name, (start, stop) in ordered:
        dtype, shape = str(tensors[name]["dtype"]), cast("list[int]", tensors[name]["shape"])
        if dtype in _BYTES and stop - start != prod(shape) * _BYTES[dtype]:
            return f"{shown(name)} has {stop - start} bytes, which are not {shape} numbers of {dtype}"
        if stop > data_bytes:
            return f"{shown(name)} lies up to byte {stop}, and {data_bytes} follow the header"
    before = 0
    for name, (start, stop) in ordered:
        if start != before:
            what = "overlaps what comes before" if start < before else "begins behind a hole"
            return f"{shown(name)} {what} (at byte {start}, not {before})"
        before = stop
    return None


class FiniteCheck:
    """Refuses tensors that hold a number which is not finite, as the model will have it."""

    def __init__(self, *, at_once: bool) -> None:
        """`at_once`: whether a tensor's values can be asked for without waiting for a device."""
        self._at_once = at_once
        self._sums: list[Tensor] = []
        self._suspects: list[tuple[str, Callable[[], Tensor], torch.dtype]] = []

    def add(self, name: str, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        """Check a tensor; `read` gives it as it is stored, to see what is wrong with it."""
        if not tensor.is_floating_point() or tensor.itemsize == 1 or tensor.is_meta:
            return  # torch adds up no numbers of 8 bits
        if not self._at_once:
            self._sums.append(tensor.sum(dtype=torch.float32))
            self._suspects.append((name, read, tensor.dtype))
        elif not tensor.sum().isfinite():
            _refuse_infinite(name, read(), tensor)

    def finish(self) -> None:
        """Look at all that was not looked at yet. What seems wrong is read again, on the host."""
        if not self._sums:
            return
        are_finite = torch.stack(self._sums).isfinite().tolist()
        for is_finite, (name, read, dtype) in zip(are_finite, self._suspects, strict=True):
            if not is_finite:
                _refuse_infinite(name, stored := read(), stored.to(dtype))


def _refuse_infinite(name: str, stored: Tensor, tensor: Tensor) -> None:
    """Raise if a tensor holds a number that is not finite.

    A sum is finite only if all its terms are, and takes no longer than to read them. It may be infinite
    although they are not, so they are counted before anything is said.
    """
    wrong, from_file = ((~x.isfinite()).sum().item() for x in (tensor, stored))
    if from_file:
        raise WeightsError(
            f"{name} has {from_file} of {stored.numel()} numbers that are NaN or infinite; {DAMAGED}"
        )
    if wrong:
        largest, kind = stored.abs().max().item(), str(tensor.dtype).removeprefix("torch.")
        raise WeightsError(
            f"{name} has numbers up to {largest:.3g}, which {kind} cannot hold: choose another --dtype"
        )
