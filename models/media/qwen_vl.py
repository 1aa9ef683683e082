"""The Qwen-VL kind: pictures keep their shape, within bounds of area, and need as many tokens as that has. Of
videos some frames of each second are taken, of which two become one of the tower's."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
import numpy as np

from models.media.files import (
    CLIP_PIXELS,
    SETTINGS,
    MediaFiles,
    Merge,
    PictureSettings,
    Small,
    read_facts,
    read_settings,
    read_video_settings,
)
from models.media.item import Layout, MediaError, Picture, Prepared, Video, interleaved, run_of
from models.media.resize import check_ratio, to_item
from models.plain_files import ConfigError

_Area = Annotated[int, msgspec.Meta(ge=1, le=1 << 28)]
_Frames = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]

_DEFAULTS = {"Qwen2VLImageProcessor": {"resample": 3, **CLIP_PIXELS}}
_START, _END = "<|vision_start|>", "<|vision_end|>"


class _Areas(msgspec.Struct, frozen=True):
    """The least and the greatest number of pixels, under names that elsewhere mean lengths."""

    shortest_edge: _Area = 56 * 56
    longest_edge: _Area = 28 * 28 * 1280


class QwenVLSettings(PictureSettings, frozen=True, kw_only=True):
    size: _Areas = _Areas()
    min_pixels: _Area | None = None
    """The least area in older files, where it comes before `size`."""
    max_pixels: _Area | None = None
    patch_size: Small = 14
    merge_size: Merge = 2
    """Patches of each side of a square that becomes one token."""


class QwenVideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    size: _Areas
    """The bounds of the area of a frame, or of all frames together."""
    min_pixels: _Area | None = None
    max_pixels: _Area | None = None
    resample: Literal[0, 1, 2, 3, 4, 5] = 3
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] = 2.0
    min_frames: _Frames = 4
    max_frames: _Frames = 768


class _Tower(msgspec.Struct, frozen=True):
    patch_size: int
    spatial_merge_size: int = 2
    temporal_patch_size: Literal[2] = 2
    tokens_per_second: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 4.0


class _Facts(msgspec.Struct, frozen=True):
    image_token_id: int
    vision_config: _Tower
    video_token_id: int = 151656


class QwenVLProcessor:
    """Pictures and videos of Qwen2-VL. The bounds of area hold for each frame of a video."""

    placeholder = "<|image_pad|>"
    written = f"{_START}<|image_pad|>{_END}"
    video_placeholder = "<|video_pad|>"
    video_written = f"{_START}<|video_pad|>{_END}"
    video_size = _Areas(128 * 28 * 28, 768 * 28 * 28)
    """The bounds where files name none."""

    def __init__(self, files: MediaFiles) -> None:
        self.settings = settings = read_settings(files, QwenVLSettings, _DEFAULTS)
        usual = {"size": self.video_size}
        self.video_settings = videos = read_video_settings(files, QwenVideoSettings, usual)
        facts = read_facts(files, _Facts)
        self._token, self._video_token = facts.image_token_id, facts.video_token_id
        self._tower = tower = facts.vision_config
        if (settings.patch_size, settings.merge_size) != (tower.patch_size, tower.spatial_merge_size):
            raise ConfigError(f"{SETTINGS}: patch_size and merge_size are not those of config.json's tower")
        self._unit = settings.patch_size * settings.merge_size
        self._areas = least, most = _areas(settings)
        if most < max(least, self._unit**2):
            raise ConfigError(f"{SETTINGS}: no picture has {least} to {most} pixels in whole patches")
        least, most = _areas(videos)
        self._video_areas = min(least, most), most

    def prepare(self, picture: Picture) -> Prepared:
        size = _resized(picture.size, self._unit, self._areas)
        picture = picture.resize(size, self.settings.resample)
        return to_item(picture, self.settings.patch_size, size[0] * size[1] // self._unit**2)

    def prepare_video(self, video: Video, most_frames: int, most_embeddings: int) -> Prepared:
        rate = video.rate or self.video_settings.fps
        numbers = self._taken(video.total, rate, min(self.video_settings.max_frames, most_frames))
        depth = self._tower.temporal_patch_size
        grid_frames = -(-len(numbers) // depth)
        size, tokens, frames = (0, 0), 0, list[bytes]()
        for frame in video.frames(numbers):
            if not frames:
                size = self._frame_size(frame.size, len(numbers))
                tokens = grid_frames * math.prod(size) // self._unit**2
                if tokens > most_embeddings:
                    raise MediaError(
                        f"A video may become {most_embeddings} tokens at most, and this one becomes "
                        f"{tokens}: send a shorter or a smaller one."
                    )
            frames.append(frame.resize(size, self.video_settings.resample).tobytes())
        frames += frames[-1:] * (-len(frames) % depth)
        numbers += numbers[-1:] * (-len(numbers) % depth)
        patch = self.settings.patch_size
        return Prepared(
            kind="video",
            pixels=memoryview(b"".join(frames)),
            shape=(size[1] * len(frames), size[0], 3),
            grid=(grid_frames, size[1] // patch, size[0] // patch),
            embeddings=tokens,
            interval=self._interval(len(numbers) / video.total * rate),
            seconds=tuple(
                (first + last) / rate / 2
                for first, last in zip(numbers[::depth], numbers[depth - 1 :: depth], strict=True)
            ),
        )

    def layout(self, prepared: Prepared) -> Layout:
        frames, rows, columns = prepared.grid
        count = frames * (rows // self.settings.merge_size) * (columns // self.settings.merge_size)
        return run_of(self._video_token if prepared.kind == "video" else self._token, count)

    def _taken(self, total: int, rate: float, most: int) -> list[int]:
        """The numbers of the frames that are taken of a video: from its first on, in equal steps."""
        settings, depth = self.video_settings, self._tower.temporal_patch_size
        most = min(most, total)
        count = min(max(total / rate * settings.fps, settings.min_frames), most)
        count = max(1, int(count) // depth * depth)
        steps = (np.arange(count) * (total / count)).astype(np.float32)  # rounded where transformers rounds
        return steps.astype(int).tolist()

    def _frame_size(self, size: tuple[int, int], frames: int) -> tuple[int, int]:
        return _resized(size, self._unit, self._video_areas)

    def _interval(self, rate: float) -> float:
        """How far the tower's frames lie apart on the axis of time, if so many are taken of each second."""
        return 1.0


class Qwen25VLProcessor(QwenVLProcessor):
    """Pictures and videos of Qwen2.5-VL, which knows how much time passes between frames."""

    def _interval(self, rate: float) -> float:
        return self._tower.tokens_per_second * (self._tower.temporal_patch_size / rate)


class Qwen3VLProcessor(QwenVLProcessor):
    """Pictures and videos of Qwen3-VL and Qwen3.5, which read the time in front of each frame. The bounds of
    area hold for all frames of a video together."""

    video_placeholder = QwenVLProcessor.video_written
    video_size = _Areas(128 * 32 * 32, 768 * 32 * 32)

    def _taken(self, total: int, rate: float, most: int) -> list[int]:
        """The numbers of the frames that are taken of a video: from its first to its last."""
        settings = self.video_settings
        count = min(max(int(total / rate * settings.fps), settings.min_frames), most, total)
        return np.linspace(0, total - 1, count).round().astype(int).tolist()

    def _frame_size(self, size: tuple[int, int], frames: int) -> tuple[int, int]:
        depth, shorter = self._tower.temporal_patch_size, min(size)
        if shorter < self._unit:
            width, height = (int(side * (self._unit / shorter)) for side in size)
            size = width, height
        counted = max(depth, round(frames / depth) * depth)
        return _resized(size, self._unit, self._video_areas, frames, counted)

    def layout(self, prepared: Prepared) -> Layout:
        if prepared.kind != "video":
            return super().layout(prepared)
        first, *others = [f"<{each:.1f} seconds>" for each in prepared.seconds]
        size = prepared.embeddings // len(prepared.seconds)
        parts: list[int | str] = [_START, size]
        for time in others:
            parts += [f"{_END}{time}{_START}", size]
        return msgspec.structs.replace(interleaved(self._video_token, [*parts, _END]), before=first)


class ColQwen2Processor(QwenVLProcessor):
    """Pages for search, each of which is a prompt of its own: no chat template writes it."""

    written = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        "Describe the image.<|im_end|><|endoftext|>"
    )


def _areas(settings: QwenVLSettings | QwenVideoSettings) -> tuple[int, int]:
    """The least and the greatest area."""
    size = settings.size
    return settings.min_pixels or size.shortest_edge, settings.max_pixels or size.longest_edge


def _resized(
    size: tuple[int, int], unit: int, areas: tuple[int, int], frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """The nearest size in whole tokens for so many frames whose area together is within the bounds.
    `counted`: the frames by which it is checked, those of the tower's whole frames."""
    check_ratio(*size)
    least, most = areas
    area = frames * math.prod(size)
    sides = [round(side / unit) * unit for side in size]
    if counted * math.prod(sides) > most:
        shrink = math.sqrt(area / most)
        sides = [max(unit, math.floor(side / shrink / unit) * unit) for side in size]
    elif counted * math.prod(sides) < least:
        grow = math.sqrt(least / area)
        sides = [math.ceil(side * grow / unit) * unit for side in size]
    return sides[0], sides[1]
