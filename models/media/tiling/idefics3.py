"""Idefics3 and SmolVLM: tiles of a picture, which texts number by row and column, and the whole one last."""

from __future__ import annotations

import math

import msgspec

from models.media.files import (
    SETTINGS,
    Longest,
    MediaFiles,
    Merge,
    PictureSettings,
    Side,
    read_facts,
    read_settings,
)
from models.media.item import Layout, Picture, Prepared, interleaved
from models.media.pixels import HALF_PIXELS
from models.media.resize import check_ratio
from models.media.tiling.tiles import cut, stacked
from models.plain_files import ConfigError

_CLASS = {"resample": 1, "do_pad": True, **HALF_PIXELS}
_DEFAULTS = {"Idefics3ImageProcessor": _CLASS, "SmolVLMImageProcessor": _CLASS}
_LONGEST = 4096
_FAKE = "<fake_token_around_image>"


class Idefics3Settings(PictureSettings, frozen=True, kw_only=True):
    size: Longest = msgspec.field(default_factory=lambda: {"longest_edge": 4 * 364})
    max_image_size: Longest = msgspec.field(default_factory=lambda: {"longest_edge": 364})
    do_image_splitting: bool = True


class _Tower(msgspec.Struct, frozen=True):
    image_size: Side = 224
    patch_size: Side = 32


class _Facts(msgspec.Struct, frozen=True):
    vision_config: _Tower
    image_token_id: int = 128_257
    scale_factor: Merge = 2


class Idefics3Processor:
    placeholder = written = "<image>"

    def __init__(self, files: MediaFiles) -> None:
        self.settings = read_settings(files, Idefics3Settings, _DEFAULTS)
        facts = read_facts(files, _Facts)
        self._token, self._side = facts.image_token_id, self.settings.max_image_size["longest_edge"]
        self._patches = self._side // facts.vision_config.patch_size
        self._embeddings = self._patches**2 // facts.scale_factor**2
        if self._side != facts.vision_config.image_size or self._patches % facts.scale_factor:
            raise ConfigError(
                f"{SETTINGS}: tiles of {self._side} x {self._side} are not what the tower takes"
            )

    def prepare(self, picture: Picture) -> Prepared:
        check_ratio(*picture.size)
        side, resample = self._side, self.settings.resample
        picture = picture.resize(self._longest(*picture.size), resample)
        if self.settings.do_image_splitting:
            columns, rows = self._tiles(*picture.size)
            picture = picture.resize((columns * side, rows * side), resample)
        else:
            columns = rows = 1
        tiles = cut(picture, side, rows, columns) if rows * columns > 1 else []
        tiles.append(picture.resize((side, side), resample))
        grid = (rows, rows * self._patches, columns * self._patches)
        return stacked(tiles, grid, len(tiles) * self._embeddings)

    def layout(self, prepared: Prepared) -> Layout:
        rows, columns = prepared.grid[0], prepared.grid[2] // self._patches
        parts: list[int | str] = []
        for row in range(rows if rows * columns > 1 else 0):
            for column in range(columns):
                line = "\n" if row > 0 and column == 0 else ""
                parts += [f"{line}{_FAKE}<row_{row + 1}_col_{column + 1}>", self._embeddings]
        lines = "\n\n" if parts else ""
        return interleaved(self._token, [*parts, f"{lines}{_FAKE}<global-img>", self._embeddings, _FAKE])

    def _longest(self, width: int, height: int) -> tuple[int, int]:
        """The size whose longer side is that of the settings, where the shorter one is made even."""
        ratio, longest = width / height, self.settings.size["longest_edge"]
        short = int(longest / ratio if width >= height else longest * ratio)
        short = max(1, short + short % 2)
        if longest > _LONGEST:
            ratio = longest / short if width >= height else short / longest
            short = max(1, int(_LONGEST / ratio if width >= height else _LONGEST * ratio))
        longest = min(longest, _LONGEST)
        return (longest, short) if width >= height else (short, longest)

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """The columns and rows of tiles that a picture fills when it is enlarged."""
        ratio, side = width / height, self._side
        if width >= height:
            columns = math.ceil(width / side)
            return columns, math.ceil(int(columns * side / ratio) / side)
        rows = math.ceil(height / side)
        return math.ceil(int(rows * side * ratio) / side), rows
