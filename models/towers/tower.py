"""The contract between a tower and the models that it is put into, and what towers read and are fed with."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import msgspec
import torch
from torch import Tensor, nn

from models.config import ConfigError
from models.media.files import PictureSettings
from models.media.item import Kind
from models.plain_files import typed

Made = TypeVar("Made")
InLayers = Generator[None, None, Made]
"""A computation that pauses behind each part of a tower with `pauses`, and returns what it has made."""


def advance(computation: InLayers[Made], layers: float) -> Made | None:
    """Compute so many layers more. Returns what is made in the end; None, if it has not come to that."""
    try:
        while layers > 0:
            next(computation)
            layers -= 1
    except StopIteration as end:
        return end.value
    return None


def finish(computation: InLayers[Made]) -> Made:
    """Compute all that is left, and return what is made."""
    while True:
        try:
            next(computation)
        except StopIteration as end:
            return end.value


@dataclass(frozen=True, slots=True)
class TowerInput:
    """A media item as it was prepared (`models.media.item.Prepared`), on the device."""

    kind: Kind
    pixels: Tensor
    """[height, width, 3] uint8; tiles and frames stand below each other. Of a sound [bands, frames], of the
    tower's type of numbers."""
    grid: tuple[int, int, int]
    """The frames, and the rows and columns of patches in each, before any of them are merged."""
    embeddings: int


@dataclass(frozen=True, kw_only=True)
class TowerSetup:
    """The one argument of a tower's class."""

    config: Mapping[str, Any]
    pictures: PictureSettings
    hidden_size: int
    """The width of the text's embeddings."""
    dtype: torch.dtype


class Tower(Protocol):
    """A module that `models.checkpoint.weights.load` fills. Every rank of the first stage has it whole.

    Where tokens have positions on three axes (`models.media.positions`), its class has `three_axes = True`;
    where those of an item see each other, `sees_media = True`, and where those of a whole prompt do, with or
    without pictures, `sees_prompt = True`, too. Its layers have `pauses = True`, and so has the tower if what
    comes ahead of them takes about as long as one; where an item goes through all of it twice, it has
    `passes = 2`.
    """

    levels: int
    """The number of layers of the text behind which further rows are added; 0 for most towers."""

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        """For each item its rows [embeddings, (1 + levels) * hidden_size], of the tower's type of numbers.
        The items are computed together, and each gives the same bits alone and beside any others."""
        ...


Fields = TypeVar("Fields", bound=msgspec.Struct)


def read_tower_fields(
    config: Mapping[str, object],
    kind: type[Fields],
    usual: Mapping[str, object] | None = None,
    where: str = "config.json",
) -> Fields:
    """Read the fields of config.json that a tower needs; those that are missing or null are as in `usual`."""
    return typed({**(usual or {}), **_without_null(config)}, kind, where)


def _without_null(fields: Mapping[str, object]) -> dict[str, object]:
    return {
        name: _without_null(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }


def unused_layers(layer: int, count: int) -> int:
    """The number of a tower's last layers that are not used if the result of `layer` is. A layer 0 is what
    goes into the first one; -1 is what the last one gives."""
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


def count_layers(tower: Tower | None) -> int:
    """The layers through which a tower takes an item, at most."""
    modules = () if tower is None else cast("nn.Module", tower).modules()
    return getattr(tower, "passes", 1) * sum(getattr(module, "pauses", False) for module in modules)


def sees_media(tower: Tower | None) -> bool:
    """Whether the tokens of an item see each other, those that follow included."""
    return bool(getattr(tower, "sees_media", False))


def sees_prompts(tower: Tower | None) -> bool:
    """Whether all tokens of a prompt see each other, those that follow included."""
    return bool(getattr(tower, "sees_prompt", False))
