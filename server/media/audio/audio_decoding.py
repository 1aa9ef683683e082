"""Decoding of recordings by PyAV, whoever made them: mono samples at Whisper's rate. The container is told by
the content. This runs in processes that may be killed, see `server.media.audio.recordings`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from models.media.whisper import RATE
from server.errors import BadRequest, HttpError

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.container import InputContainer

FORMATS = "wav,w64,aiff,flac,mp3,ogg,mov,matroska,aac,amr,caf,au,asf,mpeg,mpegts,avi"
"""FFmpeg's names of the files that are read. Playlists and others that name files are not among them."""
LEAST_RATE, MOST_RATE = 4_000, 192_000
MOST_CHANNELS = 8
_OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
_BROKEN = "The recording cannot be decoded: its file is broken, or ends too early."
_BLOCK = 1 << 17
"""Samples of each channel that are resampled at a time, at least."""
_MOST_BROKEN = 0.1
"""The share of a recording's packets that may be broken. A few are left out, as players do."""
INSTALL = "Recordings are decoded by PyAV, which this server lacks: pip install av."


class NotInstalled(HttpError):
    """Raised where what reads recordings is not installed."""

    def __init__(self) -> None:
        super().__init__(501, INSTALL)


def decode_audio(file: BinaryIO, most_seconds: float) -> Iterator[np.ndarray]:
    """The samples of a file's first audio stream, float32 from -1 to 1, as they are decoded.

    Raises BadRequest, also while samples are read: also for a recording that is longer.
    """
    try:
        import av  # no dependency of those who transcribe nothing
        from av import logging
        from av.error import FFmpegError
    except ImportError:
        raise NotInstalled from None
    logging.set_level(None)
    try:
        container = av.open(file, "r", options=_OPTIONS, metadata_errors="replace")
    except (FFmpegError, ValueError):
        raise BadRequest(
            f"A recording must be one of {FORMATS} (mov is m4a and mp4 too, matroska webm, ogg opus, asf "
            "wma), and this file is none, or it is broken.",
            "file",
        ) from None
    try:
        with container:
            yield from _bounded(_resampled(container, FFmpegError), most_seconds)
    except FFmpegError:
        raise BadRequest(_BROKEN, "file") from None


def _bounded(pieces: Iterator[np.ndarray], most_seconds: float) -> Iterator[np.ndarray]:
    left = round(most_seconds * RATE)
    for samples in pieces:
        left -= len(samples)
        if left < 0:
            raise BadRequest(
                f"A recording may have at most {most_seconds:g} seconds, and this one has more. The operator "
                "sets this with --max-audio-seconds.",
                "file",
            )
        yield samples


def _resampled(container: InputContainer, broken: type[Exception]) -> Iterator[np.ndarray]:
    if not container.streams.audio:
        raise BadRequest("The file has no sound.", "file")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise BadRequest("The recording has a codec that is not known here.", "file")
    stream.codec_context.thread_count = 1  # as many files are decoded at once as there are processes
    packets, failed, found = 0, 0, None
    for packet in container.demux(stream):
        packets += 1
        try:
            frames = packet.decode()
        except broken:
            failed += 1
            continue
        for frame in frames:
            if found is None or found.form != _form_of(frame):
                if found is not None:
                    yield from found.flush()
                found = _Resampler(frame)
            yield from found.push(frame)
    if found is None or failed > max(1.0, packets * _MOST_BROKEN):
        raise BadRequest(_BROKEN, "file")
    yield from found.flush()


class _Resampler:
    """Resamples frames of one form, many at a time, which takes less of Python."""

    def __init__(self, first: AudioFrame) -> None:
        import av

        _check_stream(first)
        self._frames = av.AudioFifo()
        self._resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
        self.form = _form_of(first)

    def push(self, frame: AudioFrame) -> Iterator[np.ndarray]:
        frame.pts = None  # what is missing between two frames is not filled up
        self._frames.write(frame)
        if self._frames.samples >= _BLOCK:
            yield from self._resample(self._frames.read())

    def flush(self) -> Iterator[np.ndarray]:
        if self._frames.samples:
            yield from self._resample(self._frames.read())
        yield from self._resample(None)

    def _resample(self, frame: AudioFrame | None) -> Iterator[np.ndarray]:
        for each in self._resampler.resample(frame):
            yield each.to_ndarray()[0] / np.float32(32768)


def _form_of(frame: AudioFrame) -> tuple[str, str, int]:
    return frame.format.name, frame.layout.name, frame.sample_rate


def _check_stream(frame: AudioFrame) -> None:
    channels, rate = frame.layout.nb_channels, frame.sample_rate
    if channels > MOST_CHANNELS or not LEAST_RATE <= rate <= MOST_RATE:
        raise BadRequest(
            f"A recording may have at most {MOST_CHANNELS} channels and {LEAST_RATE} to {MOST_RATE} samples "
            f"a second, and this one has {channels} and {rate}.",
            "file",
        )
