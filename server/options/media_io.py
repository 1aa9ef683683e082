"""Reads `media_io_kwargs` of the operator and of requests, which say how files of media are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec

ALL_FRAMES = 1 << 16
"""As many frames as are taken of any video."""

Color = tuple[int, int, int]
"""Red, green and blue, each from 0 to 255."""
WHITE: Color = (255, 255, 255)
_Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class ImageIo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rgba_background_color: tuple[_Byte, _Byte, _Byte] = WHITE
    """The color on which transparency lies."""


class VideoIo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_frames: Annotated[int, msgspec.Meta(ge=-1, le=ALL_FRAMES)] | None = None
    """The frames that are taken of a video, if it has as many; -1: all."""
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None
    """The most frames that are taken of each second."""


class MediaIo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    image: ImageIo = ImageIo()
    video: VideoIo = VideoIo()

    @property
    def video_settings(self) -> dict[str, object]:
        """The settings of processors by which frames are taken as these options say."""
        count, rate = self.video.num_frames, self.video.fps
        most = ALL_FRAMES if count == -1 else count
        settings: dict[str, object] = {} if rate is None else {"fps": rate}
        if most is not None:
            settings |= {"min_frames": most if rate is None else 1, "max_frames": most}
        return settings


def read_media_io(*given: Mapping[str, object]) -> MediaIo:
    """Read the options, of which later ones override earlier ones field by field. Raises ValueError."""
    merged: dict[str, Any] = {}
    for options in given:
        for kind, fields in options.items():
            both = isinstance(merged.get(kind), dict) and isinstance(fields, dict)
            merged[kind] = {**merged[kind], **cast("dict[str, Any]", fields)} if both else fields
    try:
        io = msgspec.convert(merged, MediaIo)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{error}; there are image.rgba_background_color ([red, green, blue]), video.num_frames and "
            "video.fps"
        ) from None
    if io.video.num_frames == 0:
        raise ValueError("video.num_frames is 0: take at least one frame, or all with -1")
    return io
