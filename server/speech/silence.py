"""Cuts a recording where it is silent, so that its parts can be read at the same time."""

from __future__ import annotations

import msgspec
import numpy as np

from models.media.whisper import FRAMES_PER_SECOND, PIECE_FRAMES

_LEAST_SECONDS, _SEARCHED_SECONDS = 5.0, 10.0
"""The shortest part, and the seconds at its end in which the quietest place is sought if none is silent."""


class Silence(msgspec.Struct, frozen=True):
    """The settings of voice detection. The names and values are OpenAI's."""

    threshold: float = 0.5
    """The level below which it is silent, from the quietest frames of a recording (0) to its loudest (1)."""
    silence_duration_ms: int = 200
    prefix_padding_ms: int = 300
    """How long before the next sound a cut is at most."""


def cut_at_silence(levels: np.ndarray, frames: int, silence: Silence) -> list[tuple[int, int]]:
    """The parts [first, end) of a recording, of at most a piece each, which cover it. `levels` has a value
    for each frame."""
    levels = levels[:frames]
    length = max(1, silence.silence_duration_ms * FRAMES_PER_SECOND // 1000)
    padding = max(1, silence.prefix_padding_ms * FRAMES_PER_SECOND // 1000)
    sums = np.concatenate([[0.0], np.cumsum(levels, dtype=np.float64)])
    means = (sums[length:] - sums[:-length]) / length
    """The mean level of so many frames from each one on."""
    low, high = np.percentile(levels, (5, 95)) if frames else (0.0, 0.0)
    bound = low + (high - low) * silence.threshold
    loud = np.concatenate([[0], np.cumsum(levels >= bound)])
    louds = loud[length:] - loud[:-length]
    """The frames that are not silent among as many."""
    parts, first = list[tuple[int, int]](), 0
    while frames - first > PIECE_FRAMES:
        begin, end = first + round(_LEAST_SECONDS * FRAMES_PER_SECOND), first + PIECE_FRAMES - length
        silent = np.flatnonzero(louds[begin:end] == 0)
        if len(silent):
            last = begin + int(silent[-1])
            cut = max(last + length // 2, last + length - padding)
        else:
            begin = end - round(_SEARCHED_SECONDS * FRAMES_PER_SECOND)
            cut = begin + int(np.argmin(means[begin:end])) + length // 2
        parts.append((first, cut))
        first = cut
    return [*parts, (first, frames)]
