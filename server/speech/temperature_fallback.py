"""When a piece of a recording is read again at a higher temperature, and when a reading counts as silence."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

LADDER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""The temperatures with which a piece is read, one after the other, until the reading is good."""


class Thresholds(msgspec.Struct, frozen=True):
    """Thresholds beyond which a reading is tried again, or left out. The values are OpenAI's."""

    compression_ratio: float = 2.4
    """A text that compresses by more repeats itself."""
    logprob: float = -1.0
    """The average of its tokens' logprobs, below which a reading is doubted."""
    no_speech: float = 0.6
    """The probability of no speech above which a doubted reading is silence."""

    def is_silent(self, no_speech: float, average: float) -> bool:
        return no_speech > self.no_speech and average < self.logprob

    def is_good(self, ratio: float, average: float) -> bool:
        return ratio <= self.compression_ratio and average >= self.logprob


def compression_ratio(text: str) -> float:
    """How many times longer the UTF-8 of a text is than what zlib makes of it."""
    data = text.encode("utf-8", "replace")
    return len(data) / len(zlib.compress(data))


def average_logprob(logprobs: Sequence[float]) -> float:
    """The average over all tokens of a reading, its end among them."""
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
