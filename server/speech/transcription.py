"""The options of a transcription, and what it returns."""

from __future__ import annotations

import msgspec

from server.speech.silence import Silence
from server.speech.speech_model import Draw
from server.speech.temperature_fallback import LADDER, Thresholds
from server.speech.vocabulary import TRANSCRIBE


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
