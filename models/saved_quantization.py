"""A checkpoint says in config.json, or in a file beside it, how it was quantized: this finds it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec

from models.plain_files import FileError, read_json

_FIELDS = ("quantization_config", "compression_config")
_SIDE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files of older tools, and the method of those that do not name one."""


class SavedQuantization(msgspec.Struct, frozen=True):
    """The fields that describe how a checkpoint was quantized, as they were saved."""

    place: str
    """The file, and the field that holds them if the file is config.json."""
    fields: dict[str, object]


def find_quantization(folder: Path, whole: Mapping[str, object]) -> SavedQuantization | None:
    """Find the description of a checkpoint whose config.json is `whole`; None if it is not quantized.

    Composite checkpoints have it at the top level or in their text part.
    """
    for scope in (whole, whole.get("text_config")):
        for name in _FIELDS if isinstance(scope, Mapping) else ():
            found = cast("Mapping[str, object]", scope).get(name)
            if found is not None:
                return _saved(f"config.json: {name}", found)
    for name, method in _SIDE_FILES.items():
        path = folder / name
        if path.exists():
            saved = _saved(name, read_json(path))
            inner = saved.fields.get("quantization")  # ModelOpt's file has a level more
            fields = cast("dict[str, object]", inner) if isinstance(inner, dict) else saved.fields
            return SavedQuantization(saved.place, {"quant_method": method, **fields})
    return None


def _saved(place: str, value: object) -> SavedQuantization:
    if not isinstance(value, dict):
        raise FileError(f"{place} must be an object, but is {type(value).__name__}")
    return SavedQuantization(place, cast("dict[str, object]", value))
