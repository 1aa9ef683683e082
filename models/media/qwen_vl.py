"""The Qwen-VL kind: pictures keep their shape, within bounds of area, and need as many tokens as that has."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from models.media.files import SETTINGS, MediaFiles, PictureSettings, read_facts, read_settings
from models.media.item import Layout, Picture, Prepared
from models.media.resize import check_ratio, to_item
from models.plain_files import ConfigError

_Area = Annotated[int, msgspec.Meta(ge=1, le=1 << 28)]
_Patch = Annotated[int, msgspec.Meta(ge=1, le=256)]
_Merge = Annotated[int, msgspec.Meta(ge=1, le=16)]

_DEFAULTS = {
    "Qwen2VLImageProcessor": {
        "resample": 3,
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
    }
}


class _Areas(msgspec.Struct, frozen=True):
    """The least and the greatest number of pixels, under names that elsewhere mean lengths."""

    shortest_edge: _Area = 56 * 56
    longest_edge: _Area = 28 * 28 * 1280


class QwenVLSettings(PictureSettings, frozen=True, kw_only=True):
    size: _Areas = _Areas()
    min_pixels: _Area | None = None
    """The least area in older files, where it comes before `size`."""
    max_pixels: _Area | None = None
    patch_size: _Patch = 14
    merge_size: _Merge = 2
    """Patches of each side of a square that becomes one token."""


class _Tower(msgspec.Struct, frozen=True):
    patch_size: int
    spatial_merge_size: int = 2


class _Facts(msgspec.Struct, frozen=True):
    image_token_id: int
    vision_config: _Tower


class QwenVLProcessor:
    placeholder = "<|image_pad|>"
    written = "<|vision_start|><|image_pad|><|vision_end|>"

    def __init__(self, files: MediaFiles) -> None:
        self.settings = settings = read_settings(files, QwenVLSettings, _DEFAULTS)
        facts = read_facts(files, _Facts)
        self._token, tower = facts.image_token_id, facts.vision_config
        if (settings.patch_size, settings.merge_size) != (tower.patch_size, tower.spatial_merge_size):
            raise ConfigError(f"{SETTINGS}: patch_size and merge_size are not those of config.json's tower")
        self._unit = settings.patch_size * settings.merge_size
        self._least = settings.min_pixels or settings.size.shortest_edge
        self._most = settings.max_pixels or settings.size.longest_edge
        if self._most < max(self._least, self._unit**2):
            raise ConfigError(
                f"{SETTINGS}: no picture has {self._least} to {self._most} pixels in whole patches"
            )

    def prepare(self, picture: Picture) -> Prepared:
        size = self._resized(picture.width, picture.height)
        picture = picture.resize(size, self.settings.resample)
        return to_item(picture, self.settings.patch_size, size[0] * size[1] // self._unit**2)

    def layout(self, prepared: Prepared) -> Layout:
        return Layout([self._token] * prepared.embeddings, [(0, prepared.embeddings)])

    def _resized(self, *size: int) -> tuple[int, int]:
        """The nearest size in whole tokens whose area is within the bounds."""
        check_ratio(*size)
        unit, area = self._unit, math.prod(size)
        sides = [round(side / unit) * unit for side in size]
        if math.prod(sides) > self._most:
            shrink = math.sqrt(area / self._most)
            sides = [max(unit, math.floor(side / shrink / unit) * unit) for side in size]
        elif math.prod(sides) < self._least:
            grow = math.sqrt(self._least / area)
            sides = [math.ceil(side * grow / unit) * unit for side in size]
        return sides[0], sides[1]


class ColQwen2Processor(QwenVLProcessor):
    """Pages for search, each of which is a prompt of its own: no chat template writes it."""

    written = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        "Describe the image.<|im_end|><|endoftext|>"
    )
