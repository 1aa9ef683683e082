"""Transcribes a recording: piece after piece, each from where the last closed segment ended, or parts that
are cut at silence, side by side. Nothing of the recording is left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import numpy as np

from models.media.whisper import NO_SOUND, PIECE_FRAMES
from server.speech.silence import cut_at_silence
from server.speech.speech_model import Piece, SpeechEngine
from server.speech.transcription import Asked, Counts, Segment
from server.speech.vocabulary import SpeechTokens
from server.speech.window_decoding import PieceReading, probe

MOST_AT_ONCE = 8
"""Parts of a recording that are read at the same time."""
_WARM = 0.5
"""A text that was drawn with this temperature or a higher one is not handed on to the next piece."""
_MUTE = NO_SOUND + 0.001
"""The highest level of a frame without any sound."""


class Framed(Protocol):
    """The recording, as a transcription knows it."""

    @property
    def frames(self) -> int: ...

    @property
    def levels(self) -> np.ndarray: ...


class TranscriptionJob:
    """One transcription. `run` yields its text as it is certain; the rest is there at its end."""

    def __init__(
        self,
        engine: SpeechEngine,
        known: SpeechTokens,
        recording: Framed,
        asked: Asked,
        most: int = MOST_AT_ONCE,
    ) -> None:
        """`most`: the parts that may be read at the same time."""
        self._engine, self._known, self._recording, self._asked = engine, known, recording, asked
        self._most = max(1, min(most, MOST_AT_ONCE))
        self.language = asked.language or "en"
        self.segments: list[Segment] = []
        self.counts = Counts()

    async def run(self) -> AsyncGenerator[str, None]:
        """Yields the pieces of the text, which together are `text`."""
        begun = False
        async with aclosing(self._texts()) as texts:
            async for text in texts:
                shown = text if begun else text.lstrip()
                if shown:
                    begun = True
                    yield shown

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).lstrip()

    async def _texts(self) -> AsyncGenerator[str, None]:
        frames, known = self._recording.frames, self._known
        if self._asked.language is None and known.languages:
            starts = range(0, frames, PIECE_FRAMES)
            pieces = (Piece(first, min(frames - first, PIECE_FRAMES)) for first in starts)
            if (heard := next((each for each in pieces if not self._is_mute(each)), None)) is not None:
                self.language, _ = await probe(self._engine, known, (), heard)
        if self._asked.silence is None:
            parts = [(0, frames)]
        else:
            levels, silence = self._recording.levels, self._asked.silence
            parts = await asyncio.to_thread(cut_at_silence, levels, frames, silence)
        if len(parts) == 1:
            texts = self._read_part(*parts[0], self.segments)
        else:
            texts = self._side_by_side(parts)
        async with aclosing(texts) as pieces:
            async for text in pieces:
                yield text

    async def _read_part(self, first: int, end: int, found: list[Segment]) -> AsyncGenerator[str, None]:
        """Reads from one frame to another, and appends the segments."""
        said = list[int]()
        while first < end:
            piece = Piece(first, min(PIECE_FRAMES, end - first))
            if self._is_mute(piece):
                first += piece.frames
                continue
            reading = PieceReading(self._engine, self._known, self._asked, self.language, self.counts)
            async with aclosing(reading.read(piece, self._previous(said))) as texts:
                async for text in texts:
                    yield text
            found += reading.segments
            if self._asked.conditions and reading.temperature < _WARM:
                said += reading.said
            else:
                said = []
            first += max(1, reading.advance)

    def _is_mute(self, piece: Piece) -> bool:
        """Whether a piece has no sound at all: a model would make words up."""
        levels = self._recording.levels[piece.first : piece.first + piece.frames]
        return bool(levels.max(initial=NO_SOUND) <= _MUTE)

    def _previous(self, said: Sequence[int]) -> list[int]:
        """What stands before the beginning of a piece's prompt."""
        before = [*self._asked.prompt, *said][-self._known.most_previous :]
        if not before or self._known.previous is None:
            return []
        return [self._known.previous, *before]

    async def _side_by_side(self, parts: Sequence[tuple[int, int]]) -> AsyncGenerator[str, None]:
        """Reads some parts at a time, and yields their texts in order."""
        room = asyncio.Semaphore(self._most)
        found: list[list[Segment]] = [[] for _ in parts]
        queues: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in parts]

        async def read(number: int) -> None:
            try:
                async with room, aclosing(self._read_part(*parts[number], found[number])) as texts:
                    async for text in texts:
                        queues[number].put_nowait(text)
            finally:
                queues[number].put_nowait(None)

        tasks = [asyncio.create_task(read(number)) for number in range(len(parts))]
        try:
            for number, queue in enumerate(queues):
                while (text := await queue.get()) is not None:
                    yield text
                await tasks[number]
                self.segments += found[number]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
