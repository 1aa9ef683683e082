"""The ask that is answered with what is said in a recording, while it is heard."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from engine_core.client.in_flight import AddOptions
from server.access.request_state import Attributes
from server.frontend.asks.parts import AnswerHead, Counts, End, Terms, head_fields
from server.frontend.frontend import Frontend
from server.frontend.transcriber import Transcriber
from server.media.audio.recordings import Recording
from server.speech.transcription import Asked, Segment


class Transcribe(msgspec.Struct, frozen=True, kw_only=True):
    """Write what is said in a recording, which stays open until the answer has ended."""

    terms: Terms
    recording: Recording
    asked: Asked
    """How it is heard."""
    streams: bool = False
    """Whether somebody reads the text as it comes."""

    async def open(self, frontend: Frontend) -> Transcription:
        """Raises the error that refuses the request. Nothing is heard before `texts` is iterated."""
        assert frontend.transcriber is not None, "the model transcribes nothing"
        return Transcription(frontend, frontend.transcriber, self)


class Transcription:
    """The answer to `Transcribe` while it comes."""

    def __init__(self, frontend: Frontend, transcriber: Transcriber, asked: Transcribe) -> None:
        state, facts = asked.terms.state, frontend.facts
        places = transcriber.places_for(asked.asked, facts.ready.worker.max_num_seqs)
        self._transcriber, self._asked, self._times = transcriber, asked, state.times
        self._admission = admission = state.admit(frontend.admissions, places)
        self.head = AnswerHead(**head_fields(frontend, asked.terms, asked.terms.take_id(admission)))
        given = asked.recording, asked.asked, facts, frontend.tokenizer, admission, self._piece_options
        self._job = transcriber.job(*given)
        self.known = transcriber.known
        """The special tokens of the model."""
        self.seconds, self.task = asked.recording.seconds, asked.asked.task
        state.work = self

    def _piece_options(self) -> AddOptions:
        options = self._asked.terms.add_options(self._admission, begun=self._admission.begun)
        options["streams"] = self._asked.streams
        return options

    async def texts(self) -> AsyncGenerator[str]:
        """Yields the text as it is heard. To be called once; closing it ends the request."""
        self._times.submit()
        async with aclosing(self._job.run()) as texts:
            async for text in texts:
                yield text
        self._transcriber.count(self._asked.recording, self._job.counts, self._times.started)

    async def hear(self) -> None:
        """Returns when all has been heard."""
        async with aclosing(self.texts()) as texts:
            async for _ in texts:
                pass

    @property
    def text(self) -> str:
        """What has been heard so far."""
        return self._job.text

    @property
    def segments(self) -> Sequence[Segment]:
        return self._job.segments

    @property
    def language(self) -> str:
        return self._job.language

    @property
    def end(self) -> End:
        counts = self._job.counts
        return End(Counts(counts.prompt_tokens, 0, counts.tokens), self._times)

    def describe(self) -> Attributes:
        """What a trace tells of the request."""
        counts = self._job.counts
        return {
            "gen_ai.request.id": self.head.id,
            "gen_ai.response.model": self.head.model,
            "gen_ai.usage.prompt_tokens": counts.prompt_tokens,
            "gen_ai.usage.completion_tokens": counts.tokens,
        }
