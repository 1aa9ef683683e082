"""SigLIP 2 for pictures in their own shape, each of which is a prompt of its own, of one position."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from models.media.files import SETTINGS, MediaFiles, PictureSettings, read_facts, read_settings
from models.media.fixed_size import SIGLIP
from models.media.item import Layout, Picture, Prepared, run_of
from models.media.resize import to_item
from models.plain_files import ConfigError

_SIGLIP2 = {"Siglip2ImageProcessor": {**SIGLIP, "resample": 2}}
_STEP, _MOST_SCALE = 1e-5, 100.0
"""How exactly the scale of a picture is found, and the largest one."""


class Siglip2Settings(PictureSettings, frozen=True, kw_only=True):
    patch_size: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    max_num_patches: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)] = 256
    """The most patches that a picture becomes, which has about as many."""


class _Tower(msgspec.Struct, frozen=True):
    patch_size: int = 16


class _Facts(msgspec.Struct, frozen=True):
    vision_config: _Tower


class Siglip2Processor:
    """Pictures keep their shape, in whole patches, and are as large as the number of patches lets them be."""

    placeholder = written = ""

    def __init__(self, files: MediaFiles) -> None:
        self.settings = read_settings(files, Siglip2Settings, _SIGLIP2)
        if self.settings.patch_size != read_facts(files, _Facts).vision_config.patch_size:
            raise ConfigError(f"{SETTINGS}: 'patch_size' is not that of the tower")

    def prepare(self, picture: Picture) -> Prepared:
        patch, (down, across) = self.settings.patch_size, self._shape(*picture.size)
        resized = picture.resize((across * patch, down * patch), self.settings.resample)
        return to_item(resized, patch, 1)

    def layout(self, prepared: Prepared) -> Layout:
        return run_of(0, 1)

    def _shape(self, width: int, height: int) -> tuple[int, int]:
        """The rows and columns of patches, at the scale that transformers finds by halving an interval."""
        patch, low, high = self.settings.patch_size, _STEP / 10, _MOST_SCALE

        def scaled(scale: float) -> tuple[int, int]:
            return max(1, math.ceil(height * scale / patch)), max(1, math.ceil(width * scale / patch))

        while high - low >= _STEP:
            middle = (low + high) / 2
            if math.prod(scaled(middle)) <= self.settings.max_num_patches:
                low = middle
            else:
                high = middle
        return scaled(low)
