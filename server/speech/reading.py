"""Reads one piece: language and silence first, then its text, with rising temperatures until it is good."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from models.media.whisper import FRAMES_PER_SECOND
from server.speech.quality import average_logprob, compression_ratio
from server.speech.segments import FRAMES_OF_EACH, CertainText, Span, cut_spans
from server.speech.speech_model import Draw, Piece, SpeechEngine
from server.speech.transcription import Asked, Counts, Segment, TimedWord
from server.speech.vocabulary import SpeechTokens
from server.speech.words import split_words, token_times

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
            found.append(replace(segment, words=[word for word in words if word.word]))
        return found
