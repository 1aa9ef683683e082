"""POST /api/chat and /api/generate, as Ollama has them: an answer as lines of JSON, or whole."""

from __future__ import annotations

import re
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET
from msgspec.structs import replace

from server.access.client_identity import Caller
from server.errors import OLLAMA, ApiError, BadRequest, error_body
from server.frontend.asks.answers import Converse
from server.frontend.asks.parts import ConversationHead, End, Part, Terms
from server.http.endpoint import Endpoint
from server.http.sse import StreamForm, encode, json_response
from server.options.server_flags import ServerConfig
from server.output_parsing.unread_text import Arguments, CallBegun, CallEnded, Reasoning
from server.output_parsing.unread_text import Text as TextPart
from server.reading.prompts import Conversation
from server.routes.answering import ask, ended, new_call_id, object_of, respond
from server.routes.chat import read_chat
from server.routes.request_context import frontend_of
from server.schemas.logprobs import ChatTokenLogprob, chat_logprobs
from server.schemas.ollama import answers as api
from server.schemas.ollama.requests import OllamaAnswering, OllamaChatRequest, OllamaGenerateRequest

router = APIRouter(route_class=Endpoint, tags=["Ollama"])

NDJSON = "application/x-ndjson"
_ZERO = re.compile(r"0+(\.0*)?(ms|s|m|h)?")


@router.post("/api/chat")
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await _respond(body, request, is_empty=not body.messages)


@router.post("/api/generate")
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt. The chat template writes it as a message, unless `raw` is true."""
    return await _respond(body, request, is_empty=not (body.prompt or body.suffix or body.images))


async def _respond(body: OllamaAnswering, request: Request, *, is_empty: bool) -> Response:
    frontend, is_chat = frontend_of(request), isinstance(body, OllamaChatRequest)
    frontend.check_model(body.model)
    facts = frontend.facts
    if is_empty:  # clients have a model loaded so
        return without_prompt(facts.model_names[0], "load", is_chat=is_chat)
    read = partial(read_answering, body, facts.max_model_len)
    answer = await ask(request, body, body.chat.terms, "ollama-", read)
    writer = AnswerWriter(answer.head, body)
    return await respond(request, answer, writer, stream=body.stream is not False)


def without_prompt(model: str, reason: str, *, is_chat: bool) -> Response:
    """The answer to a request that only has a model loaded or unloaded."""
    whole = _answer(model, _Said(), is_chat=is_chat)
    whole.done, whole.done_reason = True, reason
    return json_response(whole)


def may_unload(keep_alive: object, caller: Caller) -> bool:
    """Whether the model shall be unloaded behind an answer, by a client that may have it unloaded.

    The time is zero then: a number, or one with a unit, such as 0s.
    """
    return _ZERO.fullmatch(str(keep_alive)) is not None and (caller.key is None or caller.key.admin)


def read_answering(
    body: OllamaAnswering, longest: int, conversation: Conversation, terms: Terms, config: ServerConfig
) -> Converse:
    """What Ollama's request asks for, of a model whose prompt and answer have `longest` tokens."""
    window, most = body.asked.window(longest), body.chat.most_tokens
    chat = body.chat.model_copy(update={"max_completion_tokens": most and min(most, window)})
    asked = read_chat(chat, conversation, terms, config)
    if body.asked.num_ctx is None:
        return asked
    prompt, sampling = conversation.prompt.length, asked.sampling
    if prompt >= window:
        raise BadRequest(f"The prompt has {prompt} tokens, and a window of {window} has no room for it.")
    room = window - prompt
    most = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return replace(asked, sampling=replace(sampling, max_tokens=most))


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


class AnswerWriter:
    """Writes one answer. The whole of it is the join of its lines."""

    def __init__(self, head: ConversationHead, body: OllamaAnswering) -> None:
        self._head, self._logprobs = head, body.chat.logprobs
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._finish: str | None = None
        """Why the answer has ended, once it has."""
        self._new_id = new_call_id(head.dialect)
        self._open: CallBegun | None = None
        self._arguments = ""
        self._parts: list[Part] = []

    @property
    def form(self) -> StreamForm:
        return StreamForm(lambda _: self._finish is not None, _line_of, media_type=NDJSON, has_comments=False)

    def push(self, part: Part) -> bytes:
        """A line for what a part says, if it says something."""
        said = self._read(part)
        if said == _Said():
            return b""
        return encode(_answer(self._head.model, said, is_chat=self._is_chat)) + b"\n"

    def last_events(self, end: End) -> bytes:
        return encode(self._ended(_Said(), end)) + b"\n"

    def take(self, parts: list[Part]) -> None:
        self._parts = parts

    @property
    def answer(self) -> api.OllamaAnswer:
        whole = _Said()
        for part in self._parts:
            whole.add(self._read(part))
        return self._ended(whole, ended(self._parts))

    def _read(self, part: Part) -> _Said:
        said, delta = _Said(), part.delta
        for each in part.said:
            match each:
                case TextPart(text):
                    said.text += text
                case Reasoning(text):
                    said.thinking += text
                case CallBegun():
                    self._open, self._arguments = each, ""
                case Arguments(_, text):
                    self._arguments += text
                case CallEnded():
                    self._end_call(said)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
        if self._logprobs and delta.token_ids:
            said.logprobs = chat_logprobs(delta.token_ids, delta.logprobs, self._head.names)
        return said

    def _end_call(self, said: _Said) -> None:
        """Take the call that is complete. One that breaks off is none."""
        if (begun := self._open) is not None:
            function = api.CalledFunction(
                index=begun.index, name=begun.name, arguments=object_of(self._arguments)
            )
            said.calls.append(api.ToolCall(begun.id or self._new_id(), function))
            self._open = None

    def _ended(self, said: _Said, end: End) -> api.OllamaAnswer:
        """The answer, or its last line, with its times and counts."""
        found, counts, times = _answer(self._head.model, said, is_chat=self._is_chat), end.counts, end.times
        found.done, found.done_reason = True, self._finish or "stop"
        found.measure(times, counts.prompt)
        found.prompt_eval_duration = api.nanoseconds(times.prefill_time)
        found.eval_count, found.eval_duration = counts.output, api.nanoseconds(times.decode_time)
        return found
