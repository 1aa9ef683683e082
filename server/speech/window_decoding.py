"""Reads one piece: language and silence first, then its text, with rising temperatures until it is good.

Timestamps among its tokens cut the text into segments, and say where the next piece begins.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from msgspec.structs import replace

from models.media.whisper import FRAMES_PER_SECOND
from server.speech.speech_model import Draw, Piece, SpeechEngine
from server.speech.temperature_fallback import average_logprob, compression_ratio
from server.speech.transcription import Asked, Counts, Segment, TimedWord
from server.speech.vocabulary import SpeechTokens
from server.speech.words import split_words, token_times, without_silence

FRAMES_OF_EACH = 2
"""The frames from one timestamp to the next."""


class Span(NamedTuple):
    """A segment as the model has written it. Times are in frames from the piece's beginning."""

    start: int
    end: int
    tokens: list[int]
    """The timestamps among them."""


def cut_spans(tokens: Sequence[int], frames: int, known: SpeechTokens) -> tuple[list[Span], int]:
    """The segments of a piece of so many frames, and the frame from which the next one is read.

    `tokens` are without the end. Where two timestamps meet, a segment was closed. What comes behind the last
    such place is read again with the next piece, unless a single timestamp says that nothing follows. If no
    segment was closed, the whole is one.
    """
    first = known.first_timestamp
    stamped = [token >= first for token in tokens]
    ends = [at + 1 for at in range(len(tokens) - 1) if stamped[at] and stamped[at + 1]]
    if not ends:
        last = next((token for token in reversed(tokens) if token >= first), first)
        end = (last - first) * FRAMES_OF_EACH if last > first else frames
        return [Span(0, min(end, frames), list(tokens))], frames
    whole = stamped[-2:] == [False, True]
    if whole:
        ends.append(len(tokens))
    spans = [
        Span(
            (tokens[begin] - first) * FRAMES_OF_EACH,
            (tokens[end - 1] - first) * FRAMES_OF_EACH,
            list(tokens[begin:end]),
        )
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
    return spans, frames if whole else min(frames, spans[-1].end) or frames


class CertainText:
    """Finds the text tokens of a piece that will stay, while its tokens come."""

    def __init__(self, known: SpeechTokens) -> None:
        self._known = known
        self._held: list[int] = []
        self._closed = False
        """Whether a segment was closed. The first one stays, closed or not."""
        self._last_stamped = False

    def push(self, token: int) -> list[int]:
        """Text tokens that are certain now."""
        stamped = token >= self._known.first_timestamp
        closes = stamped and self._last_stamped
        self._closed = self._closed or closes
        self._last_stamped = stamped
        if self._known.is_text(token):
            self._held.append(token)
        if closes or not self._closed:
            found, self._held = self._held, []
            return found
        return []

    def end(self) -> list[int]:
        """The text tokens that are certain at the end: held ones, if a single timestamp has closed them."""
        return self._held if self._last_stamped else []


LEAST_NEW_TOKENS = 1


async def probe(
    engine: SpeechEngine, known: SpeechTokens, previous: Sequence[int], piece: Piece
) -> tuple[str, float]:
    """The language of a piece, and the probability that nobody speaks there: both from one token."""
    how = Draw(max_tokens=1, only=tuple(known.languages.values()), told=(known.no_speech,))
    async with aclosing(engine.draw([*previous, known.start], how, piece)) as drawn:
        async for tokens in drawn:
            if tokens:
                told = tokens[0].told
                return known.code_of(tokens[0].token), math.exp(told[0]) if told else 0.0
    return "en", 0.0


class PieceReading:
    """One piece. What was found is there when `read` has come to its end."""

    def __init__(
        self, engine: SpeechEngine, known: SpeechTokens, asked: Asked, language: str, counts: Counts
    ) -> None:
        self._engine, self._known, self._asked = engine, known, asked
        self._language, self._counts = language, counts
        self.tokens: list[int] = []
        """The tokens of the text, without the end."""
        self._logprobs: list[float] = []
        self.average = self.ratio = self.no_speech = self.temperature = 0.0
        self.silent = False
        self.said: list[int] = []
        """The tokens of all segments, timestamps among them."""
        self.segments: list[Segment] = []
        self.advance = 0
        """The frames after which the next piece begins."""

    async def read(self, piece: Piece, previous: Sequence[int]) -> AsyncGenerator[str, None]:
        """Yields text that will stay, as it comes; while other temperatures may be tried, at the end."""
        known, asked, thresholds = self._known, self._asked, self._asked.thresholds
        _, self.no_speech = await probe(self._engine, known, previous, piece)
        self._counts.pieces += 1
        prompt = [*previous, *known.beginning(self._language, asked.task)]
        live = len(asked.temperatures) == 1 and self.no_speech <= thresholds.no_speech
        for number, self.temperature in enumerate(asked.temperatures):
            async for text in self._draw(prompt, piece, number):
                if live:
                    yield text
            self.silent = thresholds.is_silent(self.no_speech, self.average)
            if self.silent or thresholds.is_good(self.ratio, self.average):
                break
            self._counts.retries += number < len(asked.temperatures) - 1
        if self.silent:
            self.advance = piece.frames
            return
        spans, self.advance = cut_spans(self.tokens, piece.frames, known)
        self.said = [token for span in spans for token in span.tokens]
        at = 0
        for span in spans:
            if self._text_of(span.tokens):
                logprobs = self._logprobs[at : at + len(span.tokens)]
                self.segments.append(self._segment(span, piece, logprobs))
            at += len(span.tokens)
        if asked.words:
            self.segments = await self._with_words(piece)
        if not live:
            for segment in self.segments:
                yield segment.text

    async def _draw(self, prompt: list[int], piece: Piece, number: int) -> AsyncGenerator[str, None]:
        """One reading. Yields what of its text is certain if it is kept."""
        known, asked = self._known, self._asked
        room = max(LEAST_NEW_TOKENS, known.context - len(prompt))
        most = min(asked.draw.max_tokens or room, room)
        seed = (asked.draw.seed + piece.first * len(asked.temperatures) + number) % (1 << 63)
        how = replace(asked.draw, temperature=self.temperature, seed=seed, max_tokens=most)
        self.tokens, self._logprobs = [], []
        logprobs = list[float]()
        certain, text = CertainText(known), self._engine.text()
        async with aclosing(self._engine.draw(prompt, how, piece)) as drawn:
            async for more in drawn:
                for one in more:
                    logprobs.append(one.logprob)
                    if one.token == known.end:
                        continue
                    self.tokens.append(one.token)
                    self._logprobs.append(one.logprob)
                    if (sure := certain.push(one.token)) and (shown := text.push(sure)):
                        yield shown
        if rest := text.push(certain.end()) + text.flush():
            yield rest
        self._counts.tokens += len(logprobs)
        self._counts.prompt_tokens += len(prompt)
        self.average = average_logprob(logprobs)
        self.ratio = compression_ratio(self._text_of(self.tokens).strip())

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self._engine.decode([token for token in tokens if self._known.is_text(token)])

    def _segment(self, span: Span, piece: Piece, logprobs: list[float]) -> Segment:
        return Segment(
            seek=piece.first,
            start=(piece.first + span.start) / FRAMES_PER_SECOND,
            end=(piece.first + span.end) / FRAMES_PER_SECOND,
            text=self._text_of(span.tokens),
            tokens=span.tokens,
            temperature=self.temperature,
            avg_logprob=self.average,
            compression_ratio=self.ratio,
            no_speech_prob=self.no_speech,
            logprobs=logprobs,
        )

    async def _with_words(self, piece: Piece) -> list[Segment]:
        """The segments with the times of their words."""
        known = self._known
        beginning = known.beginning(self._language, self._asked.task)
        texts = [[token for token in each.tokens if known.is_text(token)] for each in self.segments]
        said = [token for text in texts for token in text]
        if not said:
            return self.segments
        asked = [*beginning, known.no_timestamps, *said]  # each row is of the token that comes next
        columns = max(1, self.advance // FRAMES_OF_EACH)  # the next piece begins behind them
        matrix = await self._engine.align(asked, len(beginning), piece, columns)
        times = await asyncio.to_thread(token_times, matrix)
        found, at = list[Segment](), 0
        for segment, text in zip(self.segments, texts, strict=True):
            words = list[TimedWord]()
            for word in split_words(text, self._engine.decode, self._language):
                start, end = (
                    piece.first / FRAMES_PER_SECOND + float(times[i]) for i in (at, at + word.tokens)
                )
                words.append(TimedWord(word.text.strip(), round(start, 2), round(end, 2)))
                at += word.tokens
            words = [word for word in words if word.word]
            found.append(replace(segment, words=without_silence(words, segment.start, segment.end)))
        return found
