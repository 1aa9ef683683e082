"""The headers of safetensors files: what is wrong with one that the library refuses.

The library says little, and seldom of which tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import cast

_MOST_HEADER_BYTES = 100_000_000
"""The longest header that the library reads."""

_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


def find_fault(path: Path) -> str | None:
    """A clause on the first tensor that cannot lie in the file as its header says, or None if all can."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
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


def shown(name: str) -> str:
    """A tensor's name for a message; one that anybody may have written can have any length."""
    return name if len(name) <= 80 else f"{name[:50]}...{name[-20:]}"
