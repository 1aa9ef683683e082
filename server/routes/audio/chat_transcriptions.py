"""Transcriptions by a model that hears sounds in chats: a form becomes a conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request, Response

from server.access.request_state import state_of
from server.http.sse import ClientWatch, json_response
from server.media.inline_files import InlineFiles
from server.media.media_parts import MediaFile
from server.reading.body_table import CHAT
from server.routes.audio.spoken_chats import CHATS, SpokenChat, SpokenText
from server.routes.audio.text_events import TextEvents
from server.routes.conversations.conversation_call import ConversationCall, begin_conversation
from server.routes.request_context import frontend_of
from server.schemas.audio import answers
from server.schemas.audio.form import AudioForm
from server.schemas.chat import ChatRequest

_DRAWS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "max_completion_tokens",
)  # fmt: skip
"""Fields of a form that a chat has, too."""
_OF_PIECES = (
    "chunking_strategy", "condition_on_prev_tokens", "include", "timestamp_granularities",
    "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold",
)  # fmt: skip
"""Fields that ask how pieces are read, or for what only their readings tell."""


async def hear(request: Request, form: AudioForm, file: bytes, *, translates: bool) -> Response:
    """Answer with what is said in a file."""
    why = "this model reads a recording whole, and not piece by piece"
    form.check_untimed(translates=translates, unknown=_OF_PIECES, why=why)
    media = frontend_of(request).facts.media
    spoken = CHATS["" if media is None else media.transcribes]
    state = state_of(request.scope)
    state.reading, state.inline_files = CHAT, (files := InlineFiles())
    chat = _conversation(form, spoken, files.add(MediaFile(file)))

    with ClientWatch(request.receive):
        call = await begin_conversation(request, chat, chat, "trsc-")
        heard = _Heard(request, form, call, SpokenText("" if form.language else spoken.mark))
        return call.stream(heard.events()) if form.stream else await heard.whole()


class _Heard:
    """One transcription while it is answered."""

    def __init__(self, request: Request, form: AudioForm, call: ConversationCall, spoken: SpokenText) -> None:
        self._form, self._call, self._spoken, self._finish = form, call, spoken, "stop"
        self._seconds = sum(item.prepared.grid[2] for item in call.state.media_items.values()) / 100

    async def whole(self) -> Response:
        async with aclosing(self._texts()) as texts:
            text = "".join([each async for each in texts])
        if self._form.response_format == "text":
            return Response(f"{text}\n", media_type="text/plain; charset=utf-8")
        return json_response(answers.Transcription(text, answers.DurationUsage.of(self._seconds)))

    async def events(self) -> AsyncGenerator[bytes]:
        events = TextEvents(self._call)
        async with aclosing(self._texts()) as texts:
            async for text in texts:
                yield events.delta(text)
        counts, tells = self._call.counts, self._form.stream_include_usage
        yield events.end(counts.prompt, counts.output, tells_usage=tells, finish=self._finish)

    async def _texts(self) -> AsyncGenerator[str]:
        """The text as it comes. In the end it is counted what was heard."""
        async with aclosing(self._call.deltas()) as deltas:
            async for _, delta in deltas:
                self._finish = delta.finish_reason or self._finish
                if text := self._spoken.push(delta.text):
                    yield text
        if text := self._spoken.flush():
            yield text
        speech, since = self._call.frontend.metrics.of_speech(), self._call.times.started
        speech.count(self._seconds, 1, 0, time.monotonic() - since)


def _conversation(form: AudioForm, spoken: SpokenChat, reference: str) -> ChatRequest:
    messages = spoken.messages(form, {"type": "audio_url", "audio_url": {"url": reference}})
    fields = {name: getattr(form, name) for name in _DRAWS if getattr(form, name) is not None}
    fields["stream"] = form.stream
    if messages[-1]["role"] == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if form.model:
        fields["model"] = form.model
    return ChatRequest.model_validate({"messages": messages, **fields})
