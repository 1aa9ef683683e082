"""LLaVA-NeXT and OneVision: the whole picture, then tiles of it, without their padding. Rows of the tiles end
with a token, for which the tower gives an embedding too."""

from __future__ import annotations

import math
import re
from typing import Annotated, ClassVar, Literal

import msgspec

from models.media.files import (
    SETTINGS,
    MediaFiles,
    PictureSettings,
    Side,
    read_facts,
    read_settings,
    read_video_settings,
)
from models.media.fixed_size import CLIP, FixedSizeProcessor
from models.media.item import Layout, Picture, Prepared, Video, run_of
from models.media.resize import check_ratio
from models.media.tiling.tiles import check_frames, cut, frames_as_tiles, stacked
from models.plain_files import ConfigError

_NEXT = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
_ONE = [(384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)]
_ONE_SIZE = {"size": {"height": 384, "width": 384}, "do_center_crop": False}


class TiledSettings(PictureSettings, frozen=True, kw_only=True):
    image_grid_pinpoints: list[tuple[Side, Side]]
    """The heights and widths into which pictures are fitted."""


class LlavaNextProcessor(FixedSizeProcessor):
    classes = {"LlavaNextImageProcessor": {**CLIP, "do_pad": True, "image_grid_pinpoints": _NEXT}}
    usual_token = 32_000
    usual_strategy: ClassVar[str] = "default"
    usual_ratio: ClassVar[str] = ""
    """What vision_aspect_ratio is if config.json does not tell, where the family has that field."""

    def __init__(self, files: MediaFiles) -> None:
        super().__init__(files)
        self.settings = tiled = read_settings(files, TiledSettings, self.classes)
        self._canvases = tiled.image_grid_pinpoints
        if any(length % self.side for canvas in self._canvases for length in canvas):
            raise ConfigError(f"{SETTINGS}: image_grid_pinpoints are not whole tiles of {self.side} pixels")
        strategy = self.facts.vision_feature_select_strategy or self.usual_strategy
        if (strategy == "default") != self.has_class_token:
            raise ConfigError(
                f"config.json: vision_feature_select_strategy {strategy!r} does not fit the tower"
            )
        ratio = self.facts.vision_aspect_ratio or self.usual_ratio
        self._most = most_tiles(self.usual_ratio and ratio)

    def prepare(self, picture: Picture) -> Prepared:
        check_ratio(*picture.size)
        side, resample = self.side, self.settings.resample
        canvas = self._canvas(*picture.size)
        tiles = [picture.resize((side, side), resample)]
        rows, columns = canvas[0] // side, canvas[1] // side
        tiles += cut(picture.resize(_fitted(picture.size, canvas), resample), side, rows, columns)
        across = side // self.patch
        kept = _unpadded(picture.size, rows * across, columns * across)
        height, width = shrunk(*kept, across, self._most)
        return stacked(tiles, (rows, *kept), self.patches + height * (width + 1))

    def layout(self, prepared: Prepared) -> Layout:
        return run_of(self.token, prepared.embeddings)

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """The height and width that keep most of a picture's pixels, and of such that waste least."""

        def value(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / width, canvas[0] / height)
            useful = min(int(width * scale) * int(height * scale), width * height)
            return useful, useful - canvas[0] * canvas[1]

        return max(self._canvases, key=value)


class OnevisionVideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    resample: Literal[0, 1, 2, 3, 4, 5]
    max_frames: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 32
    """The most frames that are taken, and how many of a second; None: all that may be."""
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None


class _VideoFacts(msgspec.Struct, frozen=True):
    video_token_index: int = 151_647


class LlavaOnevisionProcessor(LlavaNextProcessor):
    classes = {
        "LlavaOnevisionImageProcessor": {**CLIP, **_ONE_SIZE, "do_pad": True, "image_grid_pinpoints": _ONE}
    }
    usual_token, usual_strategy, usual_ratio = 151_646, "full", "anyres_max_9"
    video_placeholder = video_written = "<video>"

    def __init__(self, files: MediaFiles) -> None:
        super().__init__(files)
        self.video_settings = read_video_settings(files, OnevisionVideoSettings, {"resample": 3})
        self._video_token = read_facts(files, _VideoFacts).video_token_index

    def prepare_video(self, video: Video, most_frames: int, most_embeddings: int) -> Prepared:
        """Frames that are spread evenly. Each has a quarter of the embeddings of a tile, and the last one one
        more."""
        settings, across = self.video_settings, self.side // self.patch
        count, each = min(settings.max_frames, video.total, most_frames), (-(-across // 2)) ** 2
        if settings.fps is not None and video.rate is not None:
            count = min(count, max(1, int(video.total / video.rate * settings.fps)))
        check_frames(count, each, most_embeddings - 1)
        numbers = [number * video.total // count for number in range(count)]
        item = frames_as_tiles(video.frames(numbers), self.side, settings.resample, across, each)
        return msgspec.structs.replace(item, embeddings=item.embeddings + 1)

    def layout(self, prepared: Prepared) -> Layout:
        token = self._video_token if prepared.kind == "video" else self.token
        return run_of(token, prepared.embeddings)


def most_tiles(ratio: str) -> int:
    """The greatest number of tiles whose patches a picture may have; 0 for no limit."""
    if not ratio:
        return 0
    if not (told := re.fullmatch(r"anyres_max_([1-9]\d*)", ratio)):
        raise ConfigError(f"config.json: vision_aspect_ratio {ratio[:80]!r} is not of the form anyres_max_9")
    return int(told[1])


def shrunk(rows: int, columns: int, across: int, most: int) -> tuple[int, int]:
    """The rows and columns of patches to which a picture's are interpolated, where they are more than `most`
    tiles of `across` patches to the side have."""
    ratio = math.sqrt(rows * columns / (most * across**2)) if most else 0
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)


def _fitted(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """The width and height of a picture that fills a canvas (height, width) in one direction."""
    width, height = size
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        return canvas[1], min(math.ceil(height * across), canvas[0])
    return min(math.ceil(width * down), canvas[1]), canvas[0]


def _unpadded(size: tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns of patches that are not padding only, in whole pairs at both sides. Rounding is
    that of transformers, which decides for whole rows."""
    width, height = size
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2
