"""InternVL: a picture is stretched to the nearest shape of square tiles, and itself is the last of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import numpy as np

from models.media.files import (
    SETTINGS,
    MediaFiles,
    PictureSettings,
    Side,
    read_facts,
    read_settings,
    read_video_settings,
)
from models.media.fixed_size import CLIP
from models.media.item import Layout, Picture, Prepared, Video, interleaved
from models.media.tiling.tiles import (
    check_frames,
    cut,
    frames_as_tiles,
    nearest_shape,
    shapes_of,
    stacked,
)
from models.plain_files import ConfigError

_DEFAULTS = {"GotOcr2ImageProcessor": {**CLIP, "size": {"height": 384, "width": 384}}}
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
_Count = Annotated[int, msgspec.Meta(ge=1, le=64)]


class InternVLSettings(PictureSettings, frozen=True, kw_only=True):
    size: dict[str, Side]
    min_patches: _Count = 1
    """The least number of tiles, without the whole picture; and the greatest."""
    max_patches: _Count = 12


class _Tower(msgspec.Struct, frozen=True):
    image_size: Side | list[Side] = 448
    patch_size: Side | list[Side] = 14


class _Facts(msgspec.Struct, frozen=True):
    vision_config: _Tower
    image_token_id: int = 151_667
    downsample_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5


class InternVLProcessor:
    placeholder = written = "<IMG_CONTEXT>"

    def __init__(self, files: MediaFiles) -> None:
        self.settings: PictureSettings
        self.settings = settings = read_settings(files, InternVLSettings, _DEFAULTS)
        facts = read_facts(files, _Facts)
        self._token: int | str = facts.image_token_id
        self._arrange(facts, settings.min_patches, settings.max_patches, settings.size)

    def _arrange(self, facts: _Facts, least: int, most: int, size: Mapping[str, int] | None = None) -> None:
        """Fix the sizes of tiles, and the shapes that `least` to `most` of them may have."""
        self._side = square(facts.vision_config.image_size)
        self._patches = self._side // square(facts.vision_config.patch_size)
        self._embeddings = int(self._patches * facts.downsample_ratio) ** 2
        self._shapes = shapes_of(least, most)
        if size not in (None, {"height": self._side, "width": self._side}):
            raise ConfigError(f"{SETTINGS}: tiles of {size} are not squares of the tower's size")

    def prepare(self, picture: Picture) -> Prepared:
        side, resample = self._side, self.settings.resample
        columns, rows = nearest_shape(self._shapes, side, *picture.size)
        enlarged = picture.resize((columns * side, rows * side), resample)
        tiles = cut(enlarged, side, rows, columns)
        if len(tiles) > 1:
            tiles.append(picture.resize((side, side), resample))
        grid = (rows, rows * self._patches, columns * self._patches)
        return stacked(tiles, grid, len(tiles) * self._embeddings)

    def layout(self, prepared: Prepared) -> Layout:
        return interleaved(self._token, ["<img>", prepared.embeddings, "</img>"])


_Frames = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class InternVLVideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    resample: Literal[0, 1, 2, 3, 4, 5] = 3
    num_frames: _Frames | None = None
    """The number of frames, if a video has as many; None leaves it to the others."""
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] = 2.0
    min_frames: _Frames = 8
    max_frames: _Frames = 32


class InternVLVideoProcessor(InternVLProcessor):
    """Pictures, and videos, each of whose frames is one tile behind its number."""

    video_placeholder = video_written = "<video>"

    def __init__(self, files: MediaFiles) -> None:
        super().__init__(files)
        self.video_settings = read_video_settings(files, InternVLVideoSettings, {})

    def prepare_video(self, video: Video, most_frames: int, most_embeddings: int) -> Prepared:
        settings = self.video_settings
        least, most = settings.min_frames, settings.max_frames
        count = settings.num_frames or min(
            max(int(video.total / (video.rate or settings.fps) * settings.fps), least), most
        )
        count = min(count, video.total, most_frames)
        check_frames(count, self._embeddings, most_embeddings)
        step = video.total / count
        middles = (step / 2 + np.arange(count) * step).astype(np.float32)  # rounded where transformers rounds
        numbers = np.minimum(middles.astype(int), video.total - 1).tolist()
        sizes = self._side, settings.resample, self._patches, self._embeddings
        return frames_as_tiles(video.frames(numbers), *sizes)

    def layout(self, prepared: Prepared) -> Layout:
        if prepared.kind != "video":
            return super().layout(prepared)
        parts: list[int | str] = [self._embeddings]
        for number in range(2, prepared.grid[0] + 1):
            parts += [f"</img>\nFrame{number}: <img>", self._embeddings]
        return msgspec.structs.replace(
            interleaved(self._token, parts), before="Frame1: <img>", after="</img>"
        )


class _GotSettings(InternVLSettings, frozen=True, kw_only=True):
    crop_to_patches: bool = False


class _GotTower(_Tower, frozen=True):
    image_size: Side | list[Side] = 1024
    patch_size: Side | list[Side] = 16


class _GotFacts(_Facts, frozen=True):
    vision_config: _GotTower
    image_token_index: int = 151_859
    downsample_ratio: float = 0.25


class GotOcr2Processor(InternVLProcessor):
    """GOT-OCR 2, whose template writes what stands around a page."""

    placeholder = written = "<imgpad>"

    def __init__(self, files: MediaFiles) -> None:
        self.settings = settings = read_settings(files, _GotSettings, _DEFAULTS)
        facts = read_facts(files, _GotFacts)
        self._token = facts.image_token_index
        most = settings.max_patches if settings.crop_to_patches else 1
        self._arrange(facts, settings.min_patches, most, settings.size)

    def layout(self, prepared: Prepared) -> Layout:
        return interleaved(self._token, [prepared.embeddings])


class _ChatFacts(_Facts, frozen=True):
    min_dynamic_patch: _Count = 1
    max_dynamic_patch: _Count = 6
    dynamic_image_size: bool = True
    use_thumbnail: bool = True


class InternVLChatProcessor(InternVLProcessor):
    """The same pictures in the checkpoints of InternVL's authors, whose files have other names for all."""

    placeholder = written = "<image>"

    def __init__(self, files: MediaFiles) -> None:
        self.settings = read_settings(files, PictureSettings, {"CLIPImageProcessor": {**CLIP, **_IMAGENET}})
        facts = read_facts(files, _ChatFacts)
        if not (facts.dynamic_image_size and facts.use_thumbnail):
            raise ConfigError(
                "config.json: pictures are served in tiles beside a thumbnail only, so dynamic_image_size "
                "and use_thumbnail must be true"
            )
        self._token = "<IMG_CONTEXT>"
        self._arrange(facts, facts.min_dynamic_patch, facts.max_dynamic_patch)


def square(size: int | list[int]) -> int:
    """The side of a square, which config.json may give as height and width."""
    sides = {size} if isinstance(size, int) else {*size}
    if len(sides) != 1:
        raise ConfigError(f"config.json: image_size and patch_size must be of squares, but one is {size}")
    return sides.pop()
