"""Transcriptions by a model that hears sounds in chats: a form becomes a conversation."""

from __future__ import annotations

import time
from functools import partial

from fastapi import Request, Response

from server.access.request_state import state_of
from server.frontend.asks.parts import ConversationHead, End, Part
from server.http.sse import DONE_FORM, ClientWatch
from server.media.inline_files import InlineFiles
from server.media.media_parts import MediaFile
from server.reading.body_table import CHAT
from server.routes.answering import ask, respond
from server.routes.audio.spoken_chats import SpokenText, spoken_chat
from server.routes.audio.text_events import TextEvents
from server.routes.chat import read_chat
from server.routes.request_context import frontend_of
from server.schemas.audio import answers
from server.schemas.audio.form import AudioForm

_OF_PIECES = (
    "chunking_strategy", "condition_on_prev_tokens", "include", "timestamp_granularities",
    "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold",
)  # fmt: skip
"""Fields that ask how pieces are read, or for what only their readings tell."""


async def hear(request: Request, form: AudioForm, file: bytes, *, translates: bool) -> Response:
    """Answer with what is said in a file."""
    why = "this model reads a recording whole, and not piece by piece"
    form.check_untimed(translates=translates, unknown=_OF_PIECES, why=why)
    spoken = spoken_chat(frontend_of(request).facts)
    state = state_of(request.scope)
    state.reading, state.inline_files = CHAT, (files := InlineFiles())
    sound = {"type": "audio_url", "audio_url": {"url": files.add(MediaFile(file))}}
    chat = spoken.conversation(form, sound)

    with ClientWatch(request.receive):
        answer = await ask(request, chat, chat.terms, "trsc-", partial(read_chat, chat))
        seconds = sum(item.prepared.grid[2] for item in state.media_items.values()) / 100
        writer = HeardWriter(answer.head, form, SpokenText("" if form.language else spoken.mark), seconds)

        async def count() -> None:
            speech = state.frontend.metrics.of_speech()
            speech.count(seconds, 1, 0, time.monotonic() - state.times.started)

        return await respond(request, answer, writer, stream=bool(form.stream), before_end=count)


class HeardWriter:
    """Writes what was heard, as a chat's answer tells it."""

    form = DONE_FORM

    def __init__(self, head: ConversationHead, form: AudioForm, spoken: SpokenText, seconds: float) -> None:
        self._asked, self._spoken, self._seconds, self._finish = form, spoken, seconds, "stop"
        self._events = TextEvents(head.id, head.created, head.model)
        self._text = ""

    def push(self, part: Part) -> bytes:
        text = self._heard(part)
        return self._events.delta(text) if text else b""

    def last_events(self, end: End) -> bytes:
        counts, tells = end.counts, self._asked.stream_include_usage
        return self._events.end(counts.prompt, counts.output, tells_usage=tells, finish=self._finish)

    def take(self, parts: list[Part]) -> None:
        self._text = "".join(map(self._heard, parts))

    @property
    def answer(self) -> answers.Transcription | Response:
        if self._asked.response_format == "text":
            return Response(f"{self._text}\n", media_type="text/plain; charset=utf-8")
        return answers.Transcription(self._text, answers.DurationUsage.of(self._seconds))

    def _heard(self, part: Part) -> str:
        self._finish = part.delta.finish_reason or self._finish
        text = self._spoken.push(part.delta.text)
        return text if part.end is None else text + self._spoken.flush()
