"""Decoding of videos by PyAV, whoever made them: frames upright, in RGB. This runs in processes that may be
killed, see `server.media.preparing`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

from PIL import Image

from models.media.item import Video
from server.errors import BadRequest
from server.media.picture_decoding import decode, from_base64

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

FORMATS = "mov,matroska,avi,mpegts,ogg"
"""FFmpeg's names of the files that are read. Playlists and others that name files are not among them."""
MOST_FRAMES = 432_000
"""The most frames that a file may have: two hours of 60 a second."""
MOST_SECONDS = 7200.0
_JPEG = b"\xff\xd8\xff"
_OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
_BROKEN = "A video cannot be decoded: its file is broken, or ends too early."


def decode_video(data: bytes, most_pixels: int, *, is_base64: bool) -> Video:
    """The video in a file, or in JPEG pictures, whose base64 has commas between them. Raises BadRequest, or
    MemoryError, also while frames are read."""
    if is_base64 and b"," in data:
        return _of_pictures([from_base64(each) for each in data.split(b",")], most_pixels)
    file = from_base64(data) if is_base64 else data
    return _of_pictures([file], most_pixels) if file[:3] == _JPEG else _of_file(file, most_pixels)


def _of_pictures(files: Sequence[bytes], most_pixels: int) -> Video:
    def frames(numbers: Sequence[int]) -> Iterator[Image.Image]:
        for number in numbers:
            yield decode(files[number], most_pixels)

    return Video(len(files), None, frames)


def _of_file(file: bytes, most_pixels: int) -> Video:
    with _opened(file) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        _check_size(width, height, most_pixels)
        rate = float(stream.average_rate or stream.guessed_rate or 24)
        total = 0
        for packet in container.demux(stream):
            total += packet.size > 0
            if total > min(MOST_FRAMES, MOST_SECONDS * rate):
                raise BadRequest(
                    f"A video may have {MOST_FRAMES} frames and {MOST_SECONDS:g} s: this one has more."
                )
    if not total:
        raise BadRequest(_BROKEN)
    return Video(total, rate, partial(_frames, file, most_pixels))


def _frames(file: bytes, most_pixels: int, numbers: Sequence[int]) -> Iterator[Image.Image]:
    """The frames with these numbers; the last one stands for those that a file has not, though it says so."""
    left = list(reversed(numbers))
    last: VideoFrame | None = None
    with _opened(file) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            last = frame
            if number == left[-1]:
                yield _picture(frame, most_pixels)
                left.pop()
                if not left:
                    return
        if last is None:
            raise BadRequest(_BROKEN)
        for _ in left:
            yield _picture(last, most_pixels)


def _picture(frame: VideoFrame, most_pixels: int) -> Image.Image:
    _check_size(frame.width, frame.height, most_pixels)
    picture = frame.to_image()
    return picture.rotate(frame.rotation, expand=True) if frame.rotation else picture


def _check_size(width: int, height: int, most_pixels: int) -> None:
    if width * height > most_pixels:
        raise BadRequest(
            f"A frame of a video may have at most {most_pixels} pixels, and this one has {width} x {height}."
        )


@contextmanager
def _opened(file: bytes) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container in a file, and its stream of pictures."""
    try:
        import av  # imported with the first video, and no dependency of those who have none
        from av.error import FFmpegError
    except ImportError:
        raise BadRequest("Videos are decoded by PyAV, which this server lacks: pip install av.") from None
    try:
        container = av.open(BytesIO(file), "r", options=_OPTIONS, metadata_errors="replace")
    except FFmpegError:
        raise BadRequest(
            f"A video must be one of {FORMATS} (mov is MP4 too, and matroska WebM), and this file is none."
        ) from None
    try:
        with container:
            stream = container.streams.best("video")
            if not isinstance(stream, av.VideoStream):
                raise BadRequest("A video has no pictures.")
            if stream.codec_context is None:
                raise BadRequest("A video has a codec that is not known here.")
            stream.codec_context.thread_count = 1  # as many files are decoded at once as there are processes
            yield container, stream
    except FFmpegError:
        raise BadRequest(_BROKEN) from None
