"""What towers are made of and fed with: the fields of config.json, and items that are tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from models.config import ConfigError
from models.vision.tower import TowerInput

Fields = TypeVar("Fields", bound=msgspec.Struct)


def read_tower_fields(
    config: Mapping[str, object],
    kind: type[Fields],
    usual: Mapping[str, object] | None = None,
    where: str = "config.json",
) -> Fields:
    """Read the fields of config.json that a tower needs; those that are missing or null are as in `usual`."""
    try:
        return msgspec.convert({**(usual or {}), **_without_null(config)}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None


def _without_null(fields: Mapping[str, object]) -> dict[str, object]:
    return {
        name: _without_null(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }


def unused_layers(layer: int, count: int) -> int:
    """The number of a tower's last layers that are not used if the result of `layer` is.

    A layer 0 is what goes into the first one; -1 is what the last one gives.
    """
    without = count - layer if layer >= 0 else -1 - layer
    if not 0 <= without <= count:
        raise ConfigError(f"config.json: the field 'vision_feature_layer' is {layer}, of {count} layers")
    return without


def cut_tiles(items: Sequence[TowerInput], side: int, patch: int) -> list[TowerInput]:
    """The tiles of items, each of which stands below the one before, as items of their own."""
    grid = 1, side // patch, side // patch
    return [
        replace(item, pixels=tile, grid=grid)
        for item in items
        for tile in item.pixels.view(-1, side, side, 3)
    ]
