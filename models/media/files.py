"""Reads what a checkpoint's files say about its media.

A setting that is missing or null has the value that transformers' class of image processor gives it, which is
not always what the family's authors published. Fields that this class does not read are ignored, as there.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast

import msgspec

from models.plain_files import ConfigError, read_object, typed

CLIP_PIXELS: Mapping[str, object] = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
HALF_PIXELS: Mapping[str, object] = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
"""How CLIP's kind normalises pixels, and how others bring them to numbers from -1 to 1."""


SETTINGS = "preprocessor_config.json"
_VIDEO_SETTINGS = "video_preprocessor_config.json"
_NEWER, _NESTED, _NESTED_VIDEO = "processor_config.json", "image_processor", "video_processor"
_NESTED_SOUND = "feature_extractor"

_ALWAYS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_pad": False,
    "do_pan_and_scan": False,
    "slice_mode": True,
}
"""Switches of which only one position is served: this one, or that of the class's own."""

Fields = TypeVar("Fields", bound=msgspec.Struct)
Side = Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
_Share = Annotated[float, msgspec.Meta(ge=-1, le=2)]
Small = Annotated[int, msgspec.Meta(ge=1, le=256)]
Merge = Annotated[int, msgspec.Meta(ge=1, le=16)]
"""The sides of patches, and of squares of patches that become one token."""
Classes = Mapping[str, Mapping[str, object]]
"""The settings of each class of image processor that a family knows, the usual one first."""
Longest = dict[Literal["longest_edge"], Side]
"""The longest side of a picture, in the form of settings."""
_Deviation = Annotated[float, msgspec.Meta(gt=0, le=2)]


class MediaFiles(msgspec.Struct, frozen=True):
    """The files of a checkpoint from which any process can make its processor of media."""

    architecture: str
    config: dict[str, object]
    """config.json, whole."""
    settings: dict[str, object]
    """preprocessor_config.json, or what newer checkpoints have of it in processor_config.json: of
    pictures, or else of sound."""
    videos: dict[str, object] = {}
    """video_preprocessor_config.json, or what newer checkpoints have of it in processor_config.json; where
    there are neither, the settings of pictures."""


class PictureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that every family has: a pixel becomes (value * rescale_factor - mean) / std."""

    resample: Literal[0, 1, 2, 3, 4, 5]
    """Pillow's number of the filter: nearest, Lanczos, bilinear, bicubic, box, Hamming."""
    image_mean: tuple[_Share, _Share, _Share]
    image_std: tuple[_Deviation, _Deviation, _Deviation]
    rescale_factor: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1 / 255


Settings = TypeVar("Settings", bound=PictureSettings)


def has_files(folder: Path) -> bool:
    """Whether a checkpoint says how its pictures are prepared."""
    return any((folder / name).exists() for name in (_NEWER, SETTINGS))


def read_files(folder: Path, architecture: str, config: dict[str, object]) -> MediaFiles:
    """Read the settings where transformers looks for them first."""
    newer = read_object(folder / _NEWER) if (folder / _NEWER).exists() else {}
    pictures, videos = newer.get(_NESTED, newer.get(_NESTED_SOUND)), newer.get(_NESTED_VIDEO)
    if not isinstance(pictures, dict):
        has_own = (folder / SETTINGS).exists()
        if not has_own and "image_mean" not in newer:
            raise ConfigError(f"{folder} has no {SETTINGS}, which says how pictures are prepared")
        pictures = read_object(folder / SETTINGS) if has_own else newer  # DeepSeek has no object for them
    if not isinstance(videos, dict):
        has_own = (folder / _VIDEO_SETTINGS).exists()
        videos = read_object(folder / _VIDEO_SETTINGS) if has_own else pictures
    both = cast("tuple[dict[str, object], dict[str, object]]", (pictures, videos))
    return MediaFiles(architecture, config, *both)


def with_settings(files: MediaFiles, settings: Mapping[str, object]) -> MediaFiles:
    """The same files with other settings in place of some."""
    both = {**files.settings, **settings}, {**files.videos, **settings}
    return msgspec.structs.replace(files, settings=both[0], videos=both[1])


def read_settings(files: MediaFiles, kind: type[Settings], defaults: Classes) -> Settings:
    """Read the settings of a checkpoint, with `defaults` for what it leaves out."""
    given = {name: value for name, value in files.settings.items() if value is not None}
    chosen = _class_name(given) or next(iter(defaults))
    if chosen not in defaults:
        raise ConfigError(
            f"{SETTINGS}: pictures are prepared by {chosen[:80]}, but {files.architecture} is served with "
            f"{' or '.join(defaults)} only"
        )
    for name, usual in _ALWAYS.items():
        if given.get(name, value := defaults[chosen].get(name, usual)) != value:
            shown = reprlib.repr(given[name])
            raise ConfigError(f"{SETTINGS}: the field '{name}' is {shown}, and only {value} is served")
    return typed({**defaults[chosen], **given}, kind, SETTINGS)


def read_sound_settings(files: MediaFiles, kind: type[Fields]) -> Fields:
    """The settings by which features of sound are made."""
    return typed({name: value for name, value in files.settings.items() if value is not None}, kind, SETTINGS)


def read_video_settings(files: MediaFiles, kind: type[Fields], defaults: Mapping[str, object]) -> Fields:
    """The settings by which videos are prepared. `defaults` has those that files may leave out."""
    given = {name: value for name, value in files.videos.items() if value is not None}
    for name in ("image_mean", "image_std"):
        if name in given and files.settings.get(name) not in (None, given[name]):
            raise ConfigError(f"{_VIDEO_SETTINGS}: the field '{name}' must be that of {SETTINGS}")
    return typed({**defaults, **given}, kind, _VIDEO_SETTINGS)


def read_facts(files: MediaFiles, kind: type[Fields], part: str = "") -> Fields:
    """The fields of config.json that a family's media need, or those of a part of it."""
    return typed(files.config.get(part) if part else files.config, kind, "config.json")


def _class_name(given: Mapping[str, object]) -> str:
    """The class of image processor, under the name that all of its variants share; empty if none is named."""
    name = str(given.get("image_processor_type") or given.get("feature_extractor_type") or "")
    name = name.removesuffix("Pil").removesuffix("Fast")
    return name.replace("FeatureExtractor", "ImageProcessor")
