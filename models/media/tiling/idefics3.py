"""Idefics3 and SmolVLM: tiles of a picture, which texts number by row and column, and the whole one last.
SmolVLM takes videos, too, each of whose frames is one tile behind its time."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Annotated

import msgspec
import numpy as np

from models.media.files import (
    HALF_PIXELS,
    SETTINGS,
    Longest,
    MediaFiles,
    Merge,
    PictureSettings,
    Side,
    read_facts,
    read_settings,
    read_video_settings,
)
from models.media.item import Layout, Picture, Prepared, Video, interleaved
from models.media.resize import check_ratio
from models.media.tiling.tiles import check_frames, cut, frames_as_tiles, stacked
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


_Frames = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=240)]
_UNKNOWN_RATE = 24.0
"""A second has so many frames for transformers where a video does not tell."""


class _Sampling(msgspec.Struct, frozen=True):
    max_frames: _Frames = 64
    fps: _Rate = 1.0


class SmolVLMVideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    video_sampling: _Sampling = _Sampling()
    max_frames: _Frames | None = None
    """The most frames that are taken, and how many of a second; None: those of `video_sampling`."""
    fps: _Rate | None = None
    min_frames: _Frames = 1


class SmolVLMProcessor(Idefics3Processor):
    video_placeholder = video_written = "<video>"

    def __init__(self, files: MediaFiles) -> None:
        super().__init__(files)
        self.video_settings = read_video_settings(files, SmolVLMVideoSettings, {})

    def prepare_video(self, video: Video, most_frames: int, most_embeddings: int) -> Prepared:
        rate = video.rate or _UNKNOWN_RATE
        numbers = self._taken(video.total, rate, most_frames)
        check_frames(len(numbers), self._embeddings, most_embeddings)
        frames = (
            frame.resize(self._longest(*frame.size), self.settings.resample)
            for frame in video.frames(numbers)
        )
        sizes = self._side, self.settings.resample, self._patches, self._embeddings
        seconds = tuple(number / rate for number in numbers)
        item = frames_as_tiles(frames, *sizes)
        return msgspec.structs.replace(item, seconds=seconds, duration=video.total / rate)

    def layout(self, prepared: Prepared) -> Layout:
        if prepared.kind != "video":
            return super().layout(prepared)
        heads = [f"\nFrame from {_clock(second)}:{_FAKE}<global-img>" for second in prepared.seconds]
        parts: list[int | str] = [self._embeddings]
        for head in heads[1:]:
            parts += [f"{_FAKE}{head}", self._embeddings]
        length = timedelta(seconds=int(prepared.duration))
        intro = (
            f"You are provided the following series of {_spelled(len(heads))} frames from a {length} "
            "[H:MM:SS] video.\n"
        )
        made = interleaved(self._token, parts)
        return msgspec.structs.replace(made, before=f"{intro}{heads[0]}", after=f"{_FAKE}\n\n")

    def _taken(self, total: int, rate: float, most_frames: int) -> list[int]:
        """The numbers of the frames that transformers takes: without a second at both ends of long videos."""
        settings, duration = self.video_settings, total / rate
        most = settings.max_frames or settings.video_sampling.max_frames
        fps = settings.fps or settings.video_sampling.fps
        count = min(max(round(fps * duration), settings.min_frames), most, most_frames)
        first, last = 0, total - 1
        if duration - 2 > most * fps:
            first, last = int(rate), min(int(total - rate), total - 1)
            first, last = (first, last) if first < last else (0, total - 1)
        return np.unique(np.linspace(first, last, count, dtype=int)).tolist()


def _clock(second: float) -> str:
    return f"{int(second // 60):02d}:{int(second % 60):02d}"


_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def _spelled(number: int) -> str:
    """A number in words, as num2words spells those below a million."""
    if number < len(_ONES):
        return _ONES[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return _TENS[ten - 2] + (f"-{_ONES[one]}" if one else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    many, rest = divmod(number, size)
    joint = " and " if rest < 100 else ", "
    return f"{_spelled(many)} {name}" + (joint + _spelled(rest) if rest else "")
