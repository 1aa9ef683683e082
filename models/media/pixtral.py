"""Pixtral and Mistral 3: pictures keep their shape, and each row of tokens ends with one that is text."""

from __future__ import annotations

import math

import msgspec

from models.media.files import Longest, MediaFiles, Merge, PictureSettings, Small, read_facts, read_settings
from models.media.item import Layout, Picture, Prepared, interleaved
from models.media.pixels import CLIP_PIXELS
from models.media.resize import to_item

_DEFAULTS = {"PixtralImageProcessor": {"resample": 3, "do_pad": True, **CLIP_PIXELS}}
_MERGES = {"Mistral3ForConditionalGeneration": 2, "LlavaForConditionalGeneration": 1}
"""The side of merged squares where config.json does not tell."""


class PixtralSettings(PictureSettings, frozen=True, kw_only=True):
    size: Longest = msgspec.field(default_factory=lambda: {"longest_edge": 1024})


class _Tower(msgspec.Struct, frozen=True):
    patch_size: Small = 16


class _Facts(msgspec.Struct, frozen=True):
    vision_config: _Tower
    image_token_index: int = 10
    spatial_merge_size: Merge | None = None


class PixtralProcessor:
    placeholder = written = "[IMG]"

    def __init__(self, files: MediaFiles) -> None:
        self.settings = read_settings(files, PixtralSettings, _DEFAULTS)
        facts = read_facts(files, _Facts)
        self._token = facts.image_token_index
        self._patch = facts.vision_config.patch_size
        self._merge = facts.spatial_merge_size or _MERGES[files.architecture]

    def prepare(self, picture: Picture) -> Prepared:
        shrink = max(1.0, max(picture.size) / self.settings.size["longest_edge"])
        unit = self._patch * self._merge
        width, height = (math.ceil(max(1, math.floor(side / shrink)) / unit) for side in picture.size)
        resized = picture.resize((width * unit, height * unit), self.settings.resample)
        return to_item(resized, self._patch, width * height)

    def layout(self, prepared: Prepared) -> Layout:
        _, rows, columns = (length // self._merge for length in prepared.grid)
        ends = ["[IMG_BREAK]"] * (rows - 1) + ["[IMG_END]"]
        return interleaved(self._token, [part for end in ends for part in (columns, end)])
