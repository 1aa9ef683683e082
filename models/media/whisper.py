"""Whisper's features of sound: the logarithms of the power in bands of the mel scale, in frames of 10 ms.

All of this is NumPy, so that any process can make them, and it takes a recording in pieces of any length.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

RATE = 16_000
"""Samples of a second."""
STEP, WINDOW = 160, 400
"""Samples from one frame to the next, and those that a frame is made of."""
FRAMES_PER_SECOND = RATE // STEP
PIECE_FRAMES = 3000
"""The frames of a piece, which is what the encoder reads: 30 seconds."""
PIECE_SECONDS = PIECE_FRAMES / FRAMES_PER_SECOND
_HALF = WINDOW // 2
_LEAST = 1e-10
NO_SOUND = -10.0
"""The logarithm of it, which all values of a frame are whose samples are 0."""
_RANGE = 8.0
"""How far below the loudest value of a recording values are told apart, in powers of ten."""
_BLOCK = 2048
"""Frames that are computed at a time."""

_LINEAR, _LOG_FROM, _LOG_STEP = 200.0 / 3, 1000.0, np.log(6.4) / 27
"""Slaney's mel scale: the hertz of a mel up to 1000 Hz, and the logarithm of what lies between two above."""


def _to_hertz(mels: np.ndarray) -> np.ndarray:
    first = _LOG_FROM / _LINEAR
    return np.where(mels < first, mels * _LINEAR, _LOG_FROM * np.exp(_LOG_STEP * (mels - first)))


def mel_filters(bands: int) -> np.ndarray:
    """The weights [frequencies, bands] of triangles up to half the rate, each of the same area."""
    highest = _LOG_FROM / _LINEAR + np.log(RATE / 2 / _LOG_FROM) / _LOG_STEP
    edges = _to_hertz(np.linspace(0.0, highest, bands + 2))
    frequencies = np.linspace(0, RATE / 2, _HALF + 1)
    slopes = edges[None, :] - frequencies[:, None]
    widths = np.diff(edges)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    return filters.astype(np.float32)


class LogMel:
    """Makes the rows of a recording whose samples come in pieces."""

    def __init__(self, bands: int) -> None:
        self._filters = mel_filters(bands)
        turns = 2 * np.pi * np.arange(WINDOW) / WINDOW
        self._window = (0.5 - 0.5 * np.cos(turns)).astype(np.float32)
        self._left = np.empty(0, np.float32)
        """Samples from the beginning of the next frame on, with those that are mirrored at the beginning."""
        self.samples = self.frames = 0
        """The samples that came, and the frames that were made of them."""

    def push(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Blocks of rows [frames, bands] of the logarithms that more samples from -1 to 1 make known."""
        begun = self.samples > _HALF
        self.samples += len(samples)
        self._left = np.concatenate([self._left, samples.astype(np.float32, copy=False)])
        if not begun:
            if self.samples <= _HALF:
                return
            self._left = np.concatenate([self._left[_HALF:0:-1], self._left])
        yield from self._rows((len(self._left) - WINDOW) // STEP + 1)

    def flush(self, least: int = PIECE_FRAMES * STEP) -> Iterator[np.ndarray]:
        """The last rows, for which the end is mirrored. A recording of fewer samples than `least`, which are
        those of a piece, has silence behind it."""
        if (missing := least - self.samples) > 0:
            yield from self.push(np.zeros(missing, np.float32))
        self._left = np.concatenate([self._left, self._left[-2 : -_HALF - 2 : -1]])
        yield from self._rows(self.samples // STEP - self.frames)

    def _rows(self, count: int) -> Iterator[np.ndarray]:
        while count > 0:
            now = min(count, _BLOCK)
            windows = np.lib.stride_tricks.sliding_window_view(self._left, WINDOW)[::STEP][:now]
            spectrum = np.fft.rfft(windows * self._window)
            power = np.square(spectrum.real) + np.square(spectrum.imag)
            yield np.log10(np.maximum(power @ self._filters, np.float32(_LEAST)))
            self._left = self._left[now * STEP :]
            self.frames += now
            count -= now


def scaled(rows: np.ndarray, loudest: float) -> np.ndarray:
    """The features [bands, PIECE_FRAMES] of the rows of a piece, in a recording with this greatest value.
    Behind its end they are 0."""
    found = np.zeros((rows.shape[1], PIECE_FRAMES), np.float32)
    found[:, : len(rows)] = scaled_rows(rows, loudest).T
    return found


def scaled_rows(rows: np.ndarray, loudest: float) -> np.ndarray:
    """The rows [frames, bands] of a recording with this greatest value, as encoders read them."""
    return (np.maximum(rows, np.float32(loudest - _RANGE)) + np.float32(4.0)) / np.float32(4.0)
