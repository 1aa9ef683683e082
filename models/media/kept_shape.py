"""Families whose pictures keep their shape: Gemma 4, Pixtral and Mistral 3, and SigLIP 2."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from models.media.files import (
    CLIP_PIXELS,
    HALF_PIXELS,
    SETTINGS,
    Longest,
    MediaFiles,
    Merge,
    PictureSettings,
    Small,
    read_facts,
    read_settings,
)
from models.media.item import Layout, Picture, Prepared, interleaved, run_of
from models.media.resize import to_item
from models.plain_files import ConfigError

_PLAIN = {"resample": 3, "image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)}
_GEMMA4 = {
    "Gemma4ForConditionalGeneration": {"Gemma4ImageProcessor": {"resample": 3, **HALF_PIXELS}},
    "Gemma4UnifiedForConditionalGeneration": {"Gemma4UnifiedImageProcessor": _PLAIN},
}
"""Settings do not normalise pixels. A model with a tower brings them to numbers from -1 to 1 itself."""
_NORMALISED = ("do_normalize", "image_mean", "image_std")


class Gemma4Settings(PictureSettings, frozen=True, kw_only=True):
    patch_size: Small = 16
    max_soft_tokens: Literal[70, 140, 280, 560, 1120] = 280
    pooling_kernel_size: Small = 3
    """The side of a square of patches of which one token is made."""


class _Gemma4Tower(msgspec.Struct, frozen=True):
    patch_size: int = 16
    pooling_kernel_size: int = 3


class _Gemma4Facts(msgspec.Struct, frozen=True):
    vision_config: _Gemma4Tower
    image_token_id: int = 258_880
    boi_token_id: int = 255_999
    eoi_token_id: int = 258_882


class Gemma4Processor:
    """A picture becomes up to a number of tokens, between two marks."""

    placeholder = written = "<|image|>"

    def __init__(self, files: MediaFiles) -> None:
        given, facts = files.settings, read_facts(files, _Gemma4Facts)
        if given.get("do_normalize"):
            raise ConfigError(f"{SETTINGS}: the field 'do_normalize' is True, and only False is served")
        plain = {name: value for name, value in given.items() if name not in _NORMALISED}
        files = msgspec.structs.replace(files, settings=plain)
        self.settings = read_settings(files, Gemma4Settings, _GEMMA4[files.architecture])
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


_PIXTRAL = {"PixtralImageProcessor": {"resample": 3, "do_pad": True, **CLIP_PIXELS}}
_PIXTRAL_MERGES = {"Mistral3ForConditionalGeneration": 2, "LlavaForConditionalGeneration": 1}
"""The side of merged squares where config.json does not tell."""


class PixtralSettings(PictureSettings, frozen=True, kw_only=True):
    size: Longest = msgspec.field(default_factory=lambda: {"longest_edge": 1024})


class _PixtralTower(msgspec.Struct, frozen=True):
    patch_size: Small = 16


class _PixtralFacts(msgspec.Struct, frozen=True):
    vision_config: _PixtralTower
    image_token_index: int = 10
    spatial_merge_size: Merge | None = None


class PixtralProcessor:
    """Each row of tokens ends with one that is text, also in Mistral 3."""

    placeholder = written = "[IMG]"

    def __init__(self, files: MediaFiles) -> None:
        self.settings = read_settings(files, PixtralSettings, _PIXTRAL)
        facts = read_facts(files, _PixtralFacts)
        self._token = facts.image_token_index
        self._patch = facts.vision_config.patch_size
        self._merge = facts.spatial_merge_size or _PIXTRAL_MERGES[files.architecture]

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


_SIGLIP2 = {"Siglip2ImageProcessor": {"resample": 2, **HALF_PIXELS}}
_STEP, _MOST_SCALE = 1e-5, 100.0
"""How exactly the scale of a picture is found, and the largest one."""


class Siglip2Settings(PictureSettings, frozen=True, kw_only=True):
    patch_size: Small = 16
    max_num_patches: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)] = 256
    """The most patches that a picture becomes, which has about as many."""


class _Siglip2Tower(msgspec.Struct, frozen=True):
    patch_size: int = 16


class Siglip2Processor:
    """A prompt of its own of one position, in whole patches, and as large as their number lets it be."""

    placeholder = written = ""

    def __init__(self, files: MediaFiles) -> None:
        self.settings = read_settings(files, Siglip2Settings, _SIGLIP2)
        if self.settings.patch_size != read_facts(files, _Siglip2Tower, "vision_config").patch_size:
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
