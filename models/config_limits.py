"""Refuses fields of config.json that no model may have, such as 10^12 tokens.

Sizes beyond the limits are mistakes: layers and tables of rotary frequencies are made for them before weights
are looked at, and kernels keep numbers for each of them in every thread.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from models.plain_files import ConfigError

MOST_LAYERS = 10_000
"""The most layers: to build more would take minutes."""
MOST_HEADS = 4096
"""The most heads of a layer, whether they attend or keep a state; the largest models have 128."""
MOST_FEATURES = 1 << 20
"""The widest states, layers and heads, and all heads of a layer together."""
_MOST_LEVELS = 64

_LIMITS = {
    "heads": MOST_HEADS,
    "head_dim": MOST_FEATURES,
    "hidden_size": MOST_FEATURES,
    "intermediate_size": MOST_FEATURES,
    "rank": MOST_FEATURES,
    "state_size": MOST_FEATURES,
}
"""The largest values of fields by the ends of their names, which families begin with words of their own."""


def check_fields(path: Path, whole: Mapping[str, object]) -> None:
    """Refuse sizes beyond all models, a number that is none, and more levels than a config has.

    Infinity may be meant, as a bound that never holds.
    """
    values: list[tuple[str, object, int]] = [("", whole, 0)]
    while values:
        name, value, depth = values.pop()
        if depth > _MOST_LEVELS:
            raise ConfigError(f"{path}: the field '{name.partition('.')[0]}' is nested too deeply")
        match value:
            case int():
                _check_size(path, name, value)
            case float() if value != value:
                raise ConfigError(f"{path}: the field '{name}' is NaN, which is not a number")
            case dict():
                inner = cast("dict[str, object]", value).items()
                values += ((f"{name}.{key}" if name else key, each, depth + 1) for key, each in inner)
            case list():
                values += ((name, each, depth + 1) for each in cast("list[object]", value))
            case _:
                pass


def check_projection(path: Path, heads: int, head_dim: int) -> None:
    """Refuse heads of attention whose queries would together be wider than any layer."""
    if heads * head_dim > MOST_FEATURES:
        raise ConfigError(
            f"{path}: {heads} attention heads of {head_dim} features have {heads * head_dim} together, and "
            f"{MOST_FEATURES} are allowed"
        )


def _check_size(path: Path, name: str, value: int) -> None:
    for end, most in _LIMITS.items():
        if value > most and name.endswith(end):
            shown = reprlib.repr(value)
            raise ConfigError(f"{path}: the field '{name}' is {shown}, but must be at most {most}")
