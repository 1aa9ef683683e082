"""Transcribes recordings for a frontend: reads files that come, and sends their pieces to engines."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine_core.client.client import EngineClient
from engine_core.client.in_flight import AddOptions
from engine_core.protocol import Failed, Source
from server.access.admission import Admission, Admissions
from server.errors import BadRequest, from_engine
from server.helpers.job_queue import Helpers
from server.media.audio.recordings import RECORDINGS, Recording, Recordings, TemporaryPath
from server.media.preparing import processes_for
from server.metrics.server_metrics import Metrics
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.requests.sampling_params import SamplingParams
from server.schemas.audio.form import AudioForm, language_code
from server.speech.speech_model import Draw, Drawn, Piece, SpeechText
from server.speech.temperature_fallback import Thresholds
from server.speech.transcribe import MOST_AT_ONCE, TranscriptionJob
from server.speech.transcription import Asked, Counts
from server.speech.vocabulary import TRANSLATE, SpeechTokens, read_tokens
from server.text.tokenizer import Tokenizer
from worker.buffers import Buffer
from worker.protocol import Pooling, Sampling, Timestamps, TokenLogprobs


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
                "timestamp_granularities: this model gives timestamps of segments, not of words.",
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
        engine = PieceEngine(
            self._client,
            admission,
            self._admissions.seconds_to_wait,
            self.known,
            recording,
            facts,
            tokenizer,
            self._metrics,
            options,
        )
        return TranscriptionJob(engine, self.known, recording, asked, admission.count)

    def places_for(self, asked: Asked, most: int) -> int:
        """The parts of a recording that are read at the same time."""
        return 1 if asked.silence is None else max(1, min(MOST_AT_ONCE, most))

    def count(self, recording: Recording, counts: Counts, since: float) -> None:
        """Count a transcription that has ended."""
        self._metrics.of_speech().count(
            recording.seconds, counts.pieces, counts.retries, time.monotonic() - since
        )


class PieceEngine:
    """Has an engine read the pieces of one recording."""

    def __init__(
        self,
        client: EngineClient,
        admission: Admission,
        seconds_to_wait: Callable[[], int],
        known: SpeechTokens,
        recording: Recording,
        facts: Facts,
        tokenizer: Tokenizer,
        metrics: Metrics,
        options: Callable[[], AddOptions],
    ) -> None:
        self._client, self._admission, self._seconds_to_wait = client, admission, seconds_to_wait
        self._known, self._recording, self._tokenizer = known, recording, tokenizer
        self._length, self._metrics, self._options = facts.ready.worker.source_len, metrics, options
        self._sources: OrderedDict[Piece, Source] = OrderedDict()
        """The pieces used last, whose features need not be read again."""

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), True)

    def text(self) -> SpeechText:
        return self._tokenizer.text_state([], True, None)

    async def _source(self, piece: Piece) -> Source:
        if (found := self._sources.get(piece)) is None:
            features = await asyncio.to_thread(self._recording.piece, piece.first, piece.frames)
            hash = self._recording.hash_of(piece.first, piece.frames).hex()
            found = Source(hash=hash, length=self._length, features=Buffer(features))
        self._sources[piece] = found
        self._sources.move_to_end(piece)
        while len(self._sources) > MOST_AT_ONCE:
            self._sources.popitem(last=False)
        return found

    async def draw(self, prompt: list[int], how: Draw, piece: Piece) -> AsyncGenerator[list[Drawn], None]:
        admission = self._admission
        admission.check()
        source = await self._source(piece)
        params = _sampling_of(how, self._known)
        options: AddOptions = {**self._options(), "source": source}
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
                    raise from_engine(new, self._seconds_to_wait())
                if new.tokens and not work.begun:
                    work.begin()
                record.tokens(len(new.tokens), new.cached)
                if (account := admission.caller.account) is not None:
                    account.wrote(len(new.tokens))
                yield _drawn(new.tokens, new.logprobs)
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
        self._admission.check()
        options: AddOptions = {**self._options(), "source": await self._source(piece)}
        params = Pooling(task="align", skip=skip, columns=columns)
        [stream] = self._client.submit_many([(tokens, params)], **options)
        try:
            answer = await anext(stream)
        finally:
            self._client.abort([stream.id])
        if isinstance(answer, Failed):
            raise from_engine(answer, self._seconds_to_wait())
        rows = np.frombuffer(answer.vectors.data, np.float32)
        return rows.reshape(answer.vectors.shape)


def _sampling_of(how: Draw, known: SpeechTokens) -> Sampling:
    """What the engine is told of how tokens are drawn."""
    if how.told:
        return Sampling(
            max_tokens=how.max_tokens,
            temperature=0.0,
            allowed_token_ids=how.only,
            told=how.told,
            stop_token_ids=(known.end,),
            logprobs=0,
        )
    greedy = how.temperature == 0
    return Sampling(
        max_tokens=how.max_tokens,
        temperature=how.temperature,
        top_p=1.0 if greedy else how.top_p,
        top_k=0 if greedy else how.top_k,
        min_p=0.0 if greedy else how.min_p,
        seed=how.seed,
        presence_penalty=how.presence_penalty,
        frequency_penalty=how.frequency_penalty,
        repetition_penalty=how.repetition_penalty,
        stop_token_ids=(known.end,),
        logprobs=0,
        logprobs_mode="masked_logprobs",
        suppressed=known.suppressed,
        suppressed_first=known.suppressed_first,
        timestamps=Timestamps(known.first_timestamp, known.end, known.no_timestamps, known.most_first),
    )


def _drawn(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Drawn]:
    return [
        Drawn(token, each.values[0], tuple(each.told)) for token, each in zip(tokens, logprobs, strict=True)
    ]
