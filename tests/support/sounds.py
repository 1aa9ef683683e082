"""Recordings of tones and noise in files of each container that is read, written with PyAV."""

from functools import cache
from io import BytesIO
from typing import Any

import numpy as np

RATE = 16_000
CONTAINERS = {
    "wav": ("wav", "pcm_s16le"),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "m4a": ("mp4", "aac"),
    "webm": ("webm", "libopus"),
    "caf": ("caf", "pcm_s16be"),
    "au": ("au", "pcm_s16be"),
    "mpeg": ("mpeg", "mp2"),
}
"""name -> FFmpeg's names of the container and of the codec."""


def tone(seconds: float, hertz: float = 440.0, level: float = 0.3, rate: int = RATE) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * hertz * times)).astype(np.float32)


def noise(seconds: float, level: float = 0.1, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(round(seconds * RATE))
    return (level * drawn).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


def written(samples: np.ndarray, name: str = "wav", *, rate: int = RATE, channels: int = 1) -> bytes:
    """A file of samples from -1 to 1, the same in each channel."""
    return _written(samples.astype(np.float32).tobytes(), name, rate, channels)


@cache
def _written(data: bytes, name: str, rate: int, channels: int) -> bytes:
    import av

    form, codec = CONTAINERS[name]
    layout = {1: "mono", 2: "stereo"}.get(channels, f"{channels}c")
    samples = (np.frombuffer(data, np.float32) * 32767).astype(np.int16)
    file = BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=48_000 if "opus" in codec else rate)
        stream.layout = layout
        for block in np.array_split(samples, max(1, len(samples) // 4096)):
            frame = av.AudioFrame.from_ndarray(np.repeat(block, channels)[None], "s16", layout)
            frame.sample_rate = rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
