"""Transcriptions of an engine in one's own process, whose steps run while they wait for tokens."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, TypedDict

import msgspec
import numpy as np

from engine_core.engine import Engine
from engine_core.protocol import Add, Failed, Output, Pooled, Source, Tokens
from server.api.audio.form import language_code
from server.errors import BadRequest, from_engine
from server.frontend.recorded_pieces import RecordedPieces, drawn, matrix_of, sampling_of
from server.media.audio.decoding import decode_audio
from server.media.audio.recordings import Recording, TemporaryPath, write_features
from server.model_facts import Facts
from server.speech.asked import LADDER, Asked, Segment
from server.speech.engine import Draw, Drawn, Piece
from server.speech.job import Job
from server.speech.vocabulary import TRANSCRIBE, TRANSLATE, SpeechTokens, read_tokens
from server.text.tokenizer import Tokenizer
from worker.protocol import Pooling, Sampling

_CLIENT = 0
_FIRST_ID = 1 << 40
"""Ids of sequences from here on are not those of other requests."""

Sound = str | Path | np.ndarray
"""The path of a recording, or samples from -1 to 1 at 16 kHz."""


class TranscribeOptions(TypedDict, total=False):
    """Keyword arguments of `LLM.transcribe`."""

    language: str | None
    """A code or an English name; it is found in each recording if it is not given."""
    task: Literal["transcribe", "translate"]
    prompt: str
    """Text that stands before each piece, as if it had been said."""
    temperature: float
    """0, the default, climbs while a reading is not good; others are used once."""
    word_timestamps: bool


class TranscriptionOutput(msgspec.Struct, frozen=True):
    """What is said in a recording."""

    text: str
    language: str
    duration: float
    segments: list[Segment]
    """None of a model that tells no times."""


class Steps:
    """Runs the steps of an engine for those who wait for its answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: dict[int, asyncio.Queue[Output]] = {}
        self._last_id = _FIRST_ID

    async def run(self) -> None:
        """Computes until it is cancelled."""
        while True:
            if self._engine.busy:
                for answer in self._engine.step().get(_CLIENT, []):
                    if isinstance(answer, Tokens | Pooled | Failed) and answer.id in self._answers:
                        self._answers[answer.id].put_nowait(answer)
            await asyncio.sleep(0)

    async def ask(
        self, tokens: list[int], params: Sampling | Pooling, source: Source
    ) -> AsyncGenerator[Tokens | Pooled, None]:
        """The answers to a request, until its last one. Raises the error that ends it."""
        self._last_id += 1
        id, answers = self._last_id, asyncio.Queue[Output]()
        self._answers[id] = answers
        self._engine.add(_CLIENT, Add(id=id, tokens=tokens, params=params, source=source))
        try:
            while True:
                answer = await answers.get()
                if isinstance(answer, Failed):
                    raise from_engine(answer, 1)
                if isinstance(answer, Tokens | Pooled):
                    yield answer
                    if isinstance(answer, Pooled) or answer.finish is not None:
                        return
        finally:
            del self._answers[id]
            self._engine.abort(_CLIENT, [id])


class _Pieces(RecordedPieces):
    """An engine that reads the pieces of one recording."""

    def __init__(
        self, steps: Steps, known: SpeechTokens, recording: Recording, facts: Facts, tokenizer: Tokenizer
    ) -> None:
        super().__init__(known, recording, facts, tokenizer)
        self._steps = steps

    async def draw(self, prompt: list[int], how: Draw, piece: Piece) -> AsyncGenerator[list[Drawn], None]:
        source = await self.source(piece)
        async for answer in self._steps.ask(prompt, sampling_of(how, self.known), source):
            if isinstance(answer, Tokens):
                yield drawn(answer.tokens, answer.logprobs)

    async def align(self, tokens: list[int], skip: int, piece: Piece, columns: int) -> np.ndarray:
        params = Pooling(task="align", skip=skip, columns=columns)
        async for answer in self._steps.ask(tokens, params, await self.source(piece)):
            if isinstance(answer, Pooled):
                return matrix_of(answer.vectors)
        raise RuntimeError("the engine has answered nothing")


def listed(sounds: Sound | Sequence[Sound]) -> list[Sound]:
    return [sounds] if isinstance(sounds, str | Path | np.ndarray) else list(sounds)


def transcribe(
    engine: Engine,
    facts: Facts,
    tokenizer: Tokenizer,
    folder: Path,
    sounds: Sequence[Sound],
    options: TranscribeOptions,
    most_seconds: float,
) -> list[TranscriptionOutput]:
    """What is said in recordings, which are read at the same time. Raises BadRequest."""
    known = read_tokens(folder)
    asked = _asked(options, known, facts, tokenizer)
    with ExitStack() as stack:
        recordings = [_open(sound, known.bands, most_seconds, stack) for sound in sounds]

        async def run() -> list[TranscriptionOutput]:
            steps = Steps(engine)
            running = asyncio.create_task(steps.run())
            jobs = [
                Job(_Pieces(steps, known, each, facts, tokenizer), known, each, asked) for each in recordings
            ]
            work = asyncio.gather(*[_finish(job, each) for job, each in zip(jobs, recordings, strict=True)])
            try:
                await asyncio.wait([running, work], return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    work.cancel()
                    running.result()
                return await work
            finally:
                running.cancel()

        return asyncio.run(run())


def _asked(options: TranscribeOptions, known: SpeechTokens, facts: Facts, tokenizer: Tokenizer) -> Asked:
    words, task = options.get("word_timestamps", False), options.get("task", TRANSCRIBE)
    if words and not facts.tells_words:
        raise BadRequest("This model tells no times of words, but of segments.", "word_timestamps")
    prompt, temperature = options.get("prompt", "").strip(), options.get("temperature", 0.0)
    return Asked(
        task=task,
        language=language_code(options.get("language"), known, translates=task == TRANSLATE),
        prompt=tuple(tokenizer.encode(f" {prompt}", False)) if prompt else (),
        temperatures=(temperature,) if temperature > 0 else LADDER,
        words=words,
    )


async def _finish(job: Job, recording: Recording) -> TranscriptionOutput:
    async for _ in job.run():
        pass
    return TranscriptionOutput(job.text, job.language, recording.seconds, job.segments)


def _open(sound: Sound, bands: int, most_seconds: float, stack: ExitStack) -> Recording:
    target = stack.enter_context(TemporaryPath())
    target.remove_name()
    if isinstance(sound, np.ndarray):
        samples = np.ascontiguousarray(sound, np.float32).ravel()
        heard = write_features([samples], bands, target.file)
        digest = hashlib.blake2b(samples.tobytes(), digest_size=32)
    else:
        with Path(sound).open("rb") as file:
            heard = write_features(decode_audio(file, most_seconds), bands, target.file)
            file.seek(0)
            digest = hashlib.blake2b(digest_size=32)
            while piece := file.read(1 << 20):
                digest.update(piece)
    return Recording(heard, bands, target.file, digest.digest())
