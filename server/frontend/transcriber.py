"""Transcribes recordings for a frontend: reads files that come, and sends their pieces to engines."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine_core.client.client import EngineClient
from engine_core.client.in_flight import AddOptions
from engine_core.protocol import Failed
from server.access.admission import Admission, Admissions
from server.errors import BadRequest, from_engine
from server.frontend.audio_windows import RecordedPieces, drawn, matrix_of, sampling_of
from server.helpers.job_queue import Helpers
from server.media.audio.recordings import RECORDINGS, Recording, Recordings, TemporaryPath
from server.media.preparing import processes_for
from server.metrics.server_metrics import Metrics
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.requests.sampling_params import SamplingParams
from server.schemas.audio.form import AudioForm, language_code
from server.speech.speech_model import Draw, Drawn, Piece
from server.speech.transcribe import MOST_AT_ONCE, TranscriptionJob
from server.speech.transcription import Asked, Counts, Thresholds
from server.speech.vocabulary import TRANSLATE, SpeechTokens, read_tokens
from server.text.tokenizer import Tokenizer
from worker.protocol import Pooling


class Transcriber:
    """Opens recordings, and has an engine read their pieces."""

    def __init__(
        self,
        config: ServerConfig,
        folder: Path,
        client: EngineClient,
        metrics: Metrics,
        admissions: Admissions,
        helpers: Helpers,
    ) -> None:
        """Raises ConfigError if the checkpoint's files cannot be used."""
        self.known = read_tokens(folder)
        options = config.media
        job = replace(RECORDINGS, processes=processes_for(options))
        self._recordings = Recordings(helpers, self.known.bands, options.max_audio_seconds, job)
        self.most_bytes = options.max_audio_mb << 20
        """The most bytes of a recording."""
        self._client, self._metrics, self._admissions = client, metrics, admissions

    def read(self, form: AudioForm, task: str, facts: Facts, tokenizer: Tokenizer) -> Asked:
        """What a form asks of a transcription. Raises BadRequest for what the model cannot do."""
        known = self.known
        words = "word" in form.timestamp_granularities
        if words and not facts.tells_words:
            raise BadRequest(
                "timestamp_granularities: this model tells no times of words, but of segments.",
                "timestamp_granularities",
            )
        language = language_code(form.language, known, translates=task == TRANSLATE)
        params = SamplingParams(
            temperature=form.temperature or 1.0,
            top_p=form.top_p,
            top_k=form.top_k,
            min_p=form.min_p,
            seed=form.seed,
            frequency_penalty=form.frequency_penalty,
            presence_penalty=form.presence_penalty,
            repetition_penalty=form.repetition_penalty,
            max_tokens=form.max_completion_tokens,
        )
        [checked] = params.resolve(facts, tokenizer, 1)
        prompt = tokenizer.encode(f" {form.prompt.strip()}", False) if form.prompt.strip() else []
        draw = Draw(
            top_p=checked.top_p,
            top_k=checked.top_k,
            min_p=checked.min_p,
            seed=secrets.randbits(62) if form.seed is None else checked.seed % (1 << 62),
            presence_penalty=checked.presence_penalty,
            frequency_penalty=checked.frequency_penalty,
            repetition_penalty=checked.repetition_penalty,
            max_tokens=form.max_completion_tokens or 0,
        )
        return Asked(
            task=task,
            language=language,
            prompt=tuple(prompt[-known.most_previous :]),
            temperatures=form.temperatures,
            draw=draw,
            thresholds=Thresholds(
                form.compression_ratio_threshold, form.logprob_threshold, form.no_speech_threshold
            ),
            conditions=form.condition_on_prev_tokens,
            words=words,
            silence=form.silence,
        )

    def opened(
        self, upload: TemporaryPath, digest: bytes, owner: str
    ) -> AbstractAsyncContextManager[Recording]:
        """The recording in a file of this owner, until its transcription has ended."""
        return self._recordings.opened(upload, digest, owner)

    def job(
        self,
        recording: Recording,
        asked: Asked,
        facts: Facts,
        tokenizer: Tokenizer,
        admission: Admission,
        options: Callable[[], AddOptions],
    ) -> TranscriptionJob:
        """A transcription, which has as many places at a time as were admitted. `options` returns what the
        engine is told of each piece."""
        engine = _Pieces(
            self._client, self._admissions, self.known, recording, facts, tokenizer, self._metrics
        )
        engine.admission, engine.options = admission, options
        return TranscriptionJob(engine, self.known, recording, asked, admission.count)

    def places_for(self, asked: Asked, most: int) -> int:
        """The parts of a recording that are read at the same time."""
        return 1 if asked.silence is None else max(1, min(MOST_AT_ONCE, most))

    def count(self, recording: Recording, counts: Counts, since: float) -> None:
        """Count a transcription that has ended."""
        self._metrics.of_speech().count(
            recording.seconds, counts.pieces, counts.retries, time.monotonic() - since
        )


class _Pieces(RecordedPieces):
    """An engine that reads the pieces of one recording."""

    admission: Admission
    options: Callable[[], AddOptions]

    def __init__(
        self,
        client: EngineClient,
        admissions: Admissions,
        known: SpeechTokens,
        recording: Recording,
        facts: Facts,
        tokenizer: Tokenizer,
        metrics: Metrics,
    ) -> None:
        super().__init__(known, recording, facts, tokenizer)
        self._client, self._admissions, self._metrics = client, admissions, metrics

    async def draw(self, prompt: list[int], how: Draw, piece: Piece) -> AsyncGenerator[list[Drawn], None]:
        admission = self.admission
        admission.check()
        source = await self.source(piece)
        params = sampling_of(how, self.known)
        options: AddOptions = {**self.options(), "source": source}
        stream = self._client.submit(prompt, params, **options)
        work = admission.begin_work(len(prompt), params.max_tokens, may_stop=True)
        record = self._metrics.begin(len(prompt), 1, params.max_tokens)
        admission.streams.add(stream.id)
        reason, timing = "abort", None
        try:
            async for new in stream:
                if isinstance(new, Failed):
                    reason = "error"
                    admission.check()
                    raise from_engine(new, self._admissions.seconds_to_wait())
                if new.tokens:
                    admission.begun = True
                    work.begin()
                record.tokens(len(new.tokens), new.cached)
                if (account := admission.caller.account) is not None:
                    account.wrote(len(new.tokens))
                yield drawn(new.tokens, new.logprobs)
                if new.finish is not None:
                    if new.finish == "abort":
                        admission.check()
                    reason, timing = new.finish, new.timing
                    return
        finally:
            self._client.abort([stream.id])
            admission.streams.discard(stream.id)
            record.finish(reason, timing)
            work.end()

    async def align(self, tokens: list[int], skip: int, piece: Piece, columns: int) -> np.ndarray:
        self.admission.check()
        options: AddOptions = {**self.options(), "source": await self.source(piece)}
        params = Pooling(task="align", skip=skip, columns=columns)
        [stream] = self._client.submit_many([(tokens, params)], **options)
        try:
            answer = await anext(stream)
        finally:
            self._client.abort([stream.id])
        if isinstance(answer, Failed):
            raise from_engine(answer, self._admissions.seconds_to_wait())
        return matrix_of(answer.vectors)
