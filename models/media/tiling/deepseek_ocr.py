"""DeepSeek-OCR: the whole page in a square, behind tiles of it where it is large."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from models.media.files import (
    HALF_PIXELS,
    SETTINGS,
    MediaFiles,
    PictureSettings,
    Side,
    Small,
    read_facts,
    read_settings,
)
from models.media.item import Layout, Picture, Prepared, run_of
from models.media.resize import check_ratio
from models.media.tiling.tiles import cut, nearest_shape, shapes_of
from models.plain_files import ConfigError

_Count = Annotated[int, msgspec.Meta(ge=1, le=64)]
_Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
_MERGED = 4
"""The side of a square of patches that becomes one token."""
_STRETCHED = 640
"""The side up to which version 1 stretches pages that are not cut into tiles."""


class DeepseekOcrSettings(PictureSettings, frozen=True, kw_only=True):
    size: dict[str, Side] = msgspec.field(default_factory=lambda: {"height": 1024, "width": 1024})
    """The square of the whole page."""
    tile_size: Side = 768
    crop_to_patches: bool = True
    """Whether pages larger than a tile are cut; if not, the whole page has the size of a tile."""
    min_patches: _Count = 2
    max_patches: _Count = 6
    background_color: tuple[_Byte, _Byte, _Byte] = (127, 127, 127)


class _Sam(msgspec.Struct, frozen=True):
    patch_size: Small = 16


class _Vision(msgspec.Struct, frozen=True):
    sam_config: _Sam = _Sam()


class _Facts(msgspec.Struct, frozen=True):
    vision_config: _Vision
    image_token_id: int = 128_815


class DeepseekOcr2Processor:
    """Version 2, as transformers prepares its pages."""

    placeholder = written = "<image>"
    usual_tile: ClassVar[int] = 768

    def __init__(self, files: MediaFiles) -> None:
        defaults = {
            "DeepseekOcr2ImageProcessor": {"resample": 3, **HALF_PIXELS, "tile_size": self.usual_tile}
        }
        self.settings = settings = read_settings(files, DeepseekOcrSettings, defaults)
        facts = read_facts(files, _Facts)
        self._token, self._patch = facts.image_token_id, facts.vision_config.sam_config.patch_size
        self._shapes = shapes_of(settings.min_patches, settings.max_patches)
        self._side = settings.tile_size
        self._whole = settings.size.get("height", 0) if settings.crop_to_patches else self._side
        sides = {self._side, self._whole}
        if len({*settings.size.values()}) != 1 or not all(map(self._is_served, sides)):
            raise ConfigError(
                f"{SETTINGS}: pages of {settings.size} and tiles of {self._side} are not served"
            )

    def prepare(self, picture: Picture) -> Prepared:
        check_ratio(*picture.size)
        side, settings, tiles = self._side, self.settings, list[Picture]()
        rows = columns = 1
        if settings.crop_to_patches and max(picture.size) > side:
            columns, rows = nearest_shape(self._shapes, side, *picture.size)
            enlarged = picture.resize((columns * side, rows * side), settings.resample)
            tiles = cut(enlarged, side, rows, columns)
        patches = (side if tiles else self._whole) // self._patch
        pixels = b"".join(view.tobytes() for view in (*tiles, self._page(picture)))
        return Prepared(
            kind="image",
            pixels=memoryview(pixels),
            shape=(len(pixels) // (3 * self._patch), self._patch, 3),
            grid=(rows, rows * patches, columns * patches),
            embeddings=self._tokens(rows, columns, len(tiles)),
        )

    def layout(self, prepared: Prepared) -> Layout:
        return run_of(self._token, prepared.embeddings)

    def _across(self, side: int) -> int:
        """The tokens in a line of a view."""
        return -(-side // (self._patch * _MERGED))

    def _is_served(self, side: int) -> bool:
        """Whether the tower has queries for views of this side: it has 12 x 12 and 16 x 16."""
        return side % self._patch == 0 and self._across(side) in (12, 16)

    def _tokens(self, rows: int, columns: int, tiles: int) -> int:
        """The tokens of views and the one that ends them."""
        return tiles * self._across(self._side) ** 2 + self._across(self._whole) ** 2 + 1

    def _page(self, picture: Picture) -> Picture:
        """The whole page in the middle of a square."""
        scale, side = self._whole / max(picture.size), self._whole
        width, height = (round(length * scale) for length in picture.size)
        resized = picture.resize((width, height), self.settings.resample)
        return self._framed(resized, (side - width) // 2, (side - height) // 2)

    def _framed(self, picture: Picture, left: int, top: int) -> Picture:
        square = (0, 0, self._whole, self._whole)
        canvas = picture.crop(square)
        canvas.paste(self.settings.background_color, square)
        canvas.paste(picture, (left, top))
        return canvas


class PublishedOcr2Processor(DeepseekOcr2Processor):
    """Version 2 as its authors prepare pages, with Pillow's rounding."""

    def _page(self, picture: Picture) -> Picture:
        (width, height), side = picture.size, self._whole
        size = side, round(height / width * side)
        if width < height:
            size = round(width / height * side), side
        resized = picture.resize(size, self.settings.resample)
        left, top = (round((side - length) * 0.5) for length in size)
        return self._framed(resized, left, top)


class DeepseekOcrProcessor(PublishedOcr2Processor):
    """Version 1: lines of tokens end with one more, on the page and over all tiles of a row."""

    usual_tile = 640

    def _is_served(self, side: int) -> bool:
        return side >= self._patch and side % self._patch == 0

    def _tokens(self, rows: int, columns: int, tiles: int) -> int:
        tile, page = self._across(self._side), self._across(self._whole)
        of_tiles = rows * tile * (columns * tile + 1) if tiles else 0
        return of_tiles + page * (page + 1) + 1

    def _page(self, picture: Picture) -> Picture:
        if not self.settings.crop_to_patches and self._whole <= _STRETCHED:
            return picture.resize((self._whole, self._whole), self.settings.resample)
        return super()._page(picture)
