"""POST /api/chat and /api/generate, as Ollama has them: an answer as lines of JSON, or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from server.errors import OLLAMA, ApiError, error_body
from server.frontend.frontend import Delta
from server.http.endpoint import Endpoint
from server.http.sse import StreamForm, encode, json_response
from server.output_parsing.unread_text import Arguments, CallBegun, CallEnded, Reasoning
from server.output_parsing.unread_text import Text as TextPart
from server.routes.conversations.conversation_call import (
    ConversationCall,
    PartReader,
    begin_conversation,
    new_call_id,
    object_of,
)
from server.routes.request_context import frontend_of
from server.schemas.logprobs import ChatTokenLogprob, chat_logprobs
from server.schemas.ollama import answers as api
from server.schemas.ollama.requests import OllamaAnswering, OllamaChatRequest, OllamaGenerateRequest

router = APIRouter(route_class=Endpoint, tags=["Ollama"])

NDJSON = "application/x-ndjson"


@router.post("/api/chat")
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await _respond(body, request, is_empty=not body.messages)


@router.post("/api/generate")
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt, which the chat template writes as a message unless it is `raw`."""
    return await _respond(body, request, is_empty=not body.prompt and not body.images)


async def _respond(body: OllamaAnswering, request: Request, *, is_empty: bool) -> Response:
    frontend, is_chat = frontend_of(request), isinstance(body, OllamaChatRequest)
    frontend.check_model(body.model)
    facts = frontend.facts
    if is_empty:  # clients have a model loaded so
        whole = _answer(facts.model_names[0], _Said(), is_chat=is_chat)
        whole.done, whole.done_reason = True, "load"
        return json_response(whole)
    window, most = body.asked.window(facts.max_model_len), body.chat.most_tokens
    bounded = body.chat.model_copy(update={"max_completion_tokens": most and min(most, window)})
    within = window if body.asked.num_ctx is not None else None
    call = await begin_conversation(request, body, bounded, "ollama-", window=within)
    writer = _AnswerWriter(call, is_chat=is_chat)
    if body.stream is not False:
        form = StreamForm(
            lambda _: writer.finish is not None, _line_of, media_type=NDJSON, has_comments=False
        )
        return call.warn(call.stream(writer.lines(), form))
    return call.warn(json_response(await writer.whole()))


def _line_of(error: ApiError) -> bytes:
    return encode(error_body(error, OLLAMA)) + b"\n"


class _Said(msgspec.Struct):
    """The content of an answer, or of a piece of it."""

    text: str = ""
    thinking: str = ""
    calls: list[api.ToolCall] = []
    logprobs: list[ChatTokenLogprob] = []

    def add(self, more: _Said) -> None:
        self.text += more.text
        self.thinking += more.thinking
        self.calls += more.calls
        self.logprobs += more.logprobs


def _answer(model: str, said: _Said, *, is_chat: bool) -> api.OllamaAnswer:
    found = api.OllamaAnswer(model=model, created_at=api.now())
    if is_chat:
        found.message = api.AnswerMessage(
            content=said.text, thinking=said.thinking or UNSET, tool_calls=said.calls or UNSET
        )
    else:
        found.response, found.thinking = said.text, said.thinking or UNSET
    found.logprobs = said.logprobs or UNSET
    return found


class _AnswerWriter:
    """Writes one answer. The whole of it is the join of its lines."""

    def __init__(self, call: ConversationCall, *, is_chat: bool) -> None:
        self.finish: str | None = None
        """Why the answer has ended, once it has."""
        self._call, self._is_chat = call, is_chat
        self._parts, self._new_id = PartReader(call), new_call_id(call.dialect)
        self._open: CallBegun | None = None
        self._arguments = ""

    async def lines(self) -> AsyncGenerator[bytes]:
        """A line for what each delta says, and one that ends the answer. An empty one sends the headers."""
        async with aclosing(self._call.deltas()) as deltas:
            async for _, delta in deltas:
                said = self._read(delta)
                lines = [] if said == _Said() else [_answer(self._call.model, said, is_chat=self._is_chat)]
                if self.finish is not None:
                    lines.append(self._ended(_Said()))
                if lines or delta.is_notice:
                    yield b"".join(encode(line) + b"\n" for line in lines)

    async def whole(self) -> api.OllamaAnswer:
        whole = _Said()
        async with aclosing(self._call.deltas()) as deltas:
            async for _, delta in deltas:
                whole.add(self._read(delta))
        return self._ended(whole)

    def _read(self, delta: Delta) -> _Said:
        said = _Said()
        for part in self._parts.read(delta):
            match part:
                case TextPart(text):
                    said.text += text
                case Reasoning(text):
                    said.thinking += text
                case CallBegun():
                    self._open, self._arguments = part, ""
                case Arguments(_, text):
                    self._arguments += text
                case CallEnded():
                    self._end_call(said)
        if delta.finish_reason is not None:
            self.finish = delta.finish_reason
            self._end_call(said)
        if self._call.chat.logprobs and delta.token_ids:
            said.logprobs = chat_logprobs(delta.token_ids, delta.logprobs, self._call.names)
        return said

    def _end_call(self, said: _Said) -> None:
        """Take the call that is complete, or has broken off, if there is one."""
        if (begun := self._open) is not None:
            function = api.CalledFunction(
                index=begun.index, name=begun.name, arguments=object_of(self._arguments)
            )
            said.calls.append(api.ToolCall(begun.id or self._new_id(), function))
            self._open = None

    def _ended(self, said: _Said) -> api.OllamaAnswer:
        """The answer, or its last line, with its times and counts."""
        found = _answer(self._call.model, said, is_chat=self._is_chat)
        found.done, found.done_reason = True, self.finish or "stop"
        counts, times = self._call.counts, self._call.times
        found.measure(times, counts.prompt)
        found.prompt_eval_duration = api.nanoseconds(times.prefill_time)
        found.eval_count, found.eval_duration = counts.output, api.nanoseconds(times.decode_time)
        return found
