"""The options of a transcription, what it returns, and how good the reading of a piece is."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from server.speech.silence import Silence
from server.speech.speech_model import Draw
from server.speech.vocabulary import TRANSCRIBE


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


LADDER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""The temperatures with which a piece is read, one after the other, until the reading is good."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a transcription."""

    task: str = TRANSCRIBE
    language: str | None = None
    """The code of the language; None: it is found in the first piece."""
    prompt: tuple[int, ...] = ()
    """Tokens that stand before each piece, as if they had been said."""
    temperatures: tuple[float, ...] = LADDER
    draw: Draw = Draw()
    """How tokens are drawn, but for the temperature. Its `max_tokens` bound the text of a piece; 0: no bound
    but the model's."""
    thresholds: Thresholds = Thresholds()
    conditions: bool = False
    """Whether a piece is read with the text so far before it."""
    words: bool = False
    silence: Silence | None = None
    """How it is cut into parts that are read at the same time; None: one piece after the other."""


class TimedWord(msgspec.Struct, frozen=True):
    """A word and its times in seconds."""

    word: str
    start: float
    end: float


class Segment(msgspec.Struct, frozen=True):
    """A part of the text, with its times in seconds, and how good the reading is that it comes from."""

    seek: int
    """The frame at which its piece begins."""
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    logprobs: list[float] = []
    """The logprobs of the tokens."""
    words: list[TimedWord] = []


class Counts(msgspec.Struct):
    """The pieces, retries and tokens that a transcription has taken so far."""

    pieces: int = 0
    retries: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
