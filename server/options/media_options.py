"""Options of what requests may bring beside text, and `media_io_kwargs`, which say how its files are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, cast

import msgspec

from worker.option_groups import MEDIA
from worker.options import OptionDoc

MEDIA_KINDS = ("image", "audio", "video")
SERVED_KINDS = ("image", "audio", "video")
"""The kinds of items that models are served with."""
DEFAULT_ITEMS = 16
"""The most items of a kind in a prompt where the operator does not say."""

ALL_FRAMES = 1 << 16
"""As many frames as are taken of any video."""

Color = tuple[int, int, int]
"""Red, green and blue, each from 0 to 255."""
WHITE: Color = (255, 255, 255)
_Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the media that requests may bring: numbers, sizes and sources."""

    limit_mm_per_prompt: Annotated[dict[str, object], OptionDoc(MEDIA)] = {}
    """Maximum number of items of each kind in a prompt, such as {"image": 4, "video": {"count": 1,
    "num_frames": 32}}; 0 refuses a kind. Default: 16 of each, and as many frames as the model's settings
    say."""
    allowed_local_media_path: Annotated[str | None, OptionDoc(MEDIA)] = None
    """A folder whose files requests may name by file:// URLs. Unlike vLLM's, links out of it are not
    followed."""
    allowed_media_domains: Annotated[list[str], OptionDoc(MEDIA)] = []
    """The only hosts from which media are fetched, at private addresses too. Default: all hosts at public
    addresses, and no others, unlike vLLM's."""
    max_media_mb: Annotated[int, OptionDoc(MEDIA, least=1, most=1024)] = 64
    """Maximum MiB of a file and of all media of a request. A body with media may be larger than others by as
    much."""
    media_seconds: Annotated[float, OptionDoc(MEDIA, least=0.1)] = 30.0
    """Seconds in which a file must be fetched and an item prepared."""
    max_audio_mb: Annotated[int, OptionDoc(MEDIA, least=1, most=1024)] = 100
    """Maximum MiB of a recording that is transcribed."""
    max_audio_seconds: Annotated[float, OptionDoc(MEDIA, least=1, most=86400)] = 7200.0
    """Maximum seconds of a recording that is transcribed, and of a sound in a chat."""
    mm_processor_kwargs: Annotated[dict[str, object], OptionDoc(MEDIA)] = {}
    """Settings of the model's processor that replace those of its files, such as {"max_pixels": 1003520}."""
    media_io_kwargs: Annotated[dict[str, object], OptionDoc(MEDIA)] = {}
    """How files are read, for each kind: {"image": {"rgba_background_color": [0, 0, 0]}} for what is
    transparent (default: white), {"video": {"num_frames": 32, "fps": 2}} for the frames that are taken (-1:
    all)."""
    trust_request_mm_kwargs: Annotated[bool, OptionDoc(MEDIA)] = False
    """Let requests have such settings themselves, as mm_processor_kwargs and media_io_kwargs."""
    enable_mm_embeds: Annotated[bool, OptionDoc(MEDIA)] = False
    """Accept pictures as embeddings that clients have computed (parts of the type image_embeds)."""
    mm_processor_workers: Annotated[int | None, OptionDoc(MEDIA, least=1, most=64)] = None
    """Processes that decode and prepare media, started when they are needed. Default: half the cores, 4 at
    most."""

    def most_of(self, kinds: Iterable[str]) -> dict[str, int]:
        """The most items in a prompt of each of these kinds of which any are taken.

        Raises ValueError if the option is wrong.
        """
        found: dict[str, int] = dict.fromkeys(MEDIA_KINDS, DEFAULT_ITEMS)
        for kind, limit in self.limit_mm_per_prompt.items():
            most = limit.get("count", DEFAULT_ITEMS) if isinstance(limit, dict) else limit
            if kind not in found:
                raise ValueError(
                    f"--limit-mm-per-prompt: {kind[:64]!r} is not a kind of media; they are "
                    + ", ".join(MEDIA_KINDS)
                )
            if not isinstance(most, int) or isinstance(most, bool) or most < 0:
                raise ValueError(
                    f"--limit-mm-per-prompt: {kind}: {limit!r} should be a number of items, 0 or more"
                )
            found[kind] = most
        return {kind: found[kind] for kind in kinds if found[kind]}

    @property
    def takes_any(self) -> bool:
        """Whether any media are taken. Without pictures, others are only if they are named: few models take
        them."""
        most = self.most_of(SERVED_KINDS)
        return "image" in most or not most.keys().isdisjoint(self.limit_mm_per_prompt)

    @property
    def most_frames(self) -> int | None:
        """The most frames that are taken of a video; None if the operator does not say.

        Raises ValueError if the option is wrong.
        """
        limit = self.limit_mm_per_prompt.get("video")
        given = cast("dict[str, object]", limit).get("num_frames") if isinstance(limit, dict) else None
        if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
            return given
        raise ValueError(f"--limit-mm-per-prompt: video: {given!r} is not a number of frames")


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
