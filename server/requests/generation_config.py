"""Reads the default sampling parameters, of generation_config.json or of the operator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from models.checkpoint.hub import ADVISED_SAMPLING
from server.request_limits import LIMITS, Limits

_SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DEFAULTS = {**{name: name for name in _SAME_NAMES}, "max_new_tokens": "max_tokens"}
"""Name in generation_config.json -> name in SamplingParams."""


class GenerationConfigError(ValueError):
    pass


class SamplingDefaults(NamedTuple):
    """Values of fields of SamplingParams, and whose they are, as the end of a sentence."""

    values: dict[str, float | int]
    origin: str
    limits: Limits = LIMITS
    """The limits of requests, with the operator's own max_new_tokens: that of the checkpoint is a default."""

    def __str__(self) -> str:
        shown = {"temperature": 1, "top_p": 1, **self.values}
        return f"{', '.join(f'{name} {value:g}' for name, value in shown.items())}, {self.origin}"


def read_generation_config(folder: Path, source: str, overrides: Mapping[str, object]) -> dict[str, object]:
    """The fields of the checkpoint's file ("auto"), another folder's, or none ("vllm"); then overrides."""
    found: dict[str, object] = {}
    if source != "vllm":
        path = (folder if source == "auto" else Path(source).expanduser()) / "generation_config.json"
        if path.is_file():
            found = _read_object(path)
        elif source != "auto":
            raise GenerationConfigError(f"--generation-config: there is no {path}")
    return {**found, **overrides}


def read_defaults(folder: Path, model: str, source: str, overrides: Mapping[str, object]) -> SamplingDefaults:
    """The defaults of sampling of a model, whose checkpoint lies in a folder.

    What its authors advise counts if the checkpoint has none of its own, and `source` is "auto".
    """
    found = read_generation_config(folder, source, {})
    origin = "the model's own" if source == "auto" else f"of --generation-config {source}"
    if not any(found.get(name) is not None for name in _SAME_NAMES):
        origin = "the neutral ones, for the model names none" if source == "auto" else origin
        if source == "auto" and model in ADVISED_SAMPLING:
            found |= ADVISED_SAMPLING[model]
            origin = "as the model's authors advise"
    if overrides:
        origin += ", with --override-generation-config"
    values: dict[str, float | int] = {}
    for key, value in (found | dict(overrides)).items():
        if key not in _DEFAULTS or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GenerationConfigError(f"generation config: {key} must be a number, got {value!r}")
        values[_DEFAULTS[key]] = value
    chosen = overrides if source in ("auto", "vllm") else found | dict(overrides)
    if chosen.get("max_new_tokens") is None:
        return SamplingDefaults(values, origin)
    if (most := values["max_tokens"]) < 1:
        raise GenerationConfigError(f"generation config: max_new_tokens must be at least 1, got {most}")
    return SamplingDefaults(values, origin, replace(LIMITS, new_tokens=int(most)))


def _read_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise GenerationConfigError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise GenerationConfigError(f"{path.name} must hold an object")
    return content
