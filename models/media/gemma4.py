"""Gemma 4: pictures keep their shape and become up to a number of tokens, between two marks."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from models.media.files import SETTINGS, MediaFiles, PictureSettings, Small, read_facts, read_settings
from models.media.item import Layout, Picture, Prepared
from models.media.pixels import HALF_PIXELS
from models.media.resize import to_item
from models.plain_files import ConfigError

_PLAIN = {"resample": 3, "image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)}
_DEFAULTS = {
    "Gemma4ForConditionalGeneration": {"Gemma4ImageProcessor": {"resample": 3, **HALF_PIXELS}},
    "Gemma4UnifiedForConditionalGeneration": {"Gemma4UnifiedImageProcessor": _PLAIN},
}
"""Settings do not normalise pixels. A model with a tower brings them to numbers from -1 to 1 itself."""
_NORMALISED = ("do_normalize", "image_mean", "image_std")


class Gemma4Settings(PictureSettings, frozen=True, kw_only=True):
    patch_size: Small = 16
    max_soft_tokens: Literal[70, 140, 280, 560, 1120] = 280
    """The most tokens that a picture becomes."""
    pooling_kernel_size: Small = 3
    """The side of a square of patches of which one token is made."""


class _Tower(msgspec.Struct, frozen=True):
    patch_size: int = 16
    pooling_kernel_size: int = 3


class _Facts(msgspec.Struct, frozen=True):
    vision_config: _Tower
    image_token_id: int = 258_880
    boi_token_id: int = 255_999
    eoi_token_id: int = 258_882


class Gemma4Processor:
    placeholder = written = "<|image|>"

    def __init__(self, files: MediaFiles) -> None:
        given, facts = files.settings, read_facts(files, _Facts)
        if given.get("do_normalize"):
            raise ConfigError(f"{SETTINGS}: the field 'do_normalize' is True, and only False is served")
        plain = {name: value for name, value in given.items() if name not in _NORMALISED}
        files = msgspec.structs.replace(files, settings=plain)
        self.settings = read_settings(files, Gemma4Settings, _DEFAULTS[files.architecture])
        tower, own = facts.vision_config, self.settings
        if (tower.patch_size, tower.pooling_kernel_size) != (own.patch_size, own.pooling_kernel_size):
            raise ConfigError(
                f"{SETTINGS}: 'patch_size' and 'pooling_kernel_size' are not those of the tower"
            )
        self._facts, self._unit = facts, own.patch_size * own.pooling_kernel_size

    def prepare(self, picture: Picture) -> Prepared:
        size = self._fitting(*picture.size)
        resized = picture if size == picture.size else picture.resize(size, self.settings.resample)
        area = size[0] * size[1]
        return to_item(resized, self.settings.patch_size, area // self._unit**2)

    def layout(self, prepared: Prepared) -> Layout:
        count, facts = prepared.embeddings, self._facts
        tokens = [facts.boi_token_id, *[facts.image_token_id] * count, facts.eoi_token_id]
        return Layout(tokens, [(1, count)])

    def _fitting(self, width: int, height: int) -> tuple[int, int]:
        """The largest size of whole squares, in the picture's shape, that has no more than may be."""
        most, unit = self.settings.max_soft_tokens, self._unit
        patches = most * self.settings.pooling_kernel_size**2
        factor = math.sqrt(patches * self.settings.patch_size**2 / (height * width))
        columns, rows = (math.floor(factor * side / unit) for side in (width, height))
        if rows == 0:
            rows, columns = 1, min(width // height, most)
        elif columns == 0:
            rows, columns = min(height // width, most), 1
        return columns * unit, rows * unit
