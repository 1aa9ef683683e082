"""POST /v1/responses: an answer as a list of items, whole, streamed as events, or computed later."""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse
from msgspec import UNSET
from msgspec.structs import replace

from server.access.request_state import state_of
from server.errors import ApiError, Overloaded, TooManyRequests
from server.frontend.asks.answers import Converse
from server.frontend.asks.parts import ConversationHead, End, Part, Terms
from server.http.endpoint import Endpoint
from server.http.sse import encode, json_response, named_event
from server.http.warnings import with_warnings
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.output_parsing.answer_reader import CustomToolInput
from server.reading.prompts import Conversation
from server.routes.answering import ask, new_call_id, read_texts, request_id, respond
from server.routes.chat import read_chat
from server.routes.conversations.event_writer import EventWriter, Kind, OpenItem, TextTokens
from server.routes.conversations.kept_responses import (
    NOT_ADDED,
    NOT_KEPT,
    add_to_conversation,
    keep_response,
    kept_of,
    queue_response,
    stream_response,
)
from server.routes.request_context import frontend_of
from server.schemas.conversations import responses as api
from server.schemas.conversations.transcript import seal
from server.schemas.logprobs import ChatTokenLogprob, chat_logprobs

router = APIRouter(route_class=Endpoint, tags=["Chat"])


@router.post("/v1/responses")
async def create_response(body: api.ResponsesRequest, request: Request) -> HttpResponse:
    """Answer a conversation with items: messages, reasoning and calls."""
    kept, conversation = kept_of(request), body.conversation_id
    stores = kept.seconds is not None and body.store is not False
    if conversation and not kept.has_room():
        raise kept.folder.full()
    if body.background:
        later = await begin_later(request, body, stored=stores)
        return await stream_response(request, later.id) if body.stream else json_response(later)
    answer = await ask(request, body, body.chat.terms, "resp_", partial(read_response, body))
    warnings = [NOT_KEPT] if stores and not kept.has_room() else []
    stores = stores and not warnings
    writer = ResponseWriter(answer.head, body, stored=stores)

    async def keep() -> None:
        if conversation and not await add_to_conversation(request, conversation, encode(writer.answer)):
            warnings.append(NOT_ADDED)
            writer.change(conversation=None)
        if stores and not await keep_response(request, answer.head.id, encode(writer.answer)):
            warnings.append(NOT_KEPT)
            writer.change(store=False)

    response = await respond(request, answer, writer, stream=bool(body.stream), before_end=keep)
    return with_warnings(response, warnings)


def read_response(
    body: api.ResponsesRequest, conversation: Conversation, terms: Terms, config: ServerConfig
) -> Converse:
    """What a request for a response asks for."""
    asked = read_chat(body.chat, conversation, terms, config)
    return replace(asked, token_by_token=body.wants_logprobs)


async def begin_later(request: Request, body: api.ResponsesRequest, *, stored: bool) -> api.Response:
    """Have a response computed when there is time; returns it as it is now."""
    frontend = frontend_of(request)
    frontend.check_model(body.model)
    state = state_of(request.scope)
    if state.read is None:
        _ = body.chat  # raises the error that refuses it
    id = f"resp_{request_id(state, body.request_id)}"
    later = replace(
        _new_response(id, int(time.time()), frontend.facts, body, stored=stored),
        status="queued",
        background=True,
    )

    async def queue() -> None:
        await asyncio.to_thread(queue_response, request, body, id, encode(later))
        request.scope["app"].state.runner.wake()

    await asyncio.shield(queue())  # the response is computed though its client has left
    return later


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: api.ResponsesRequest, request: Request) -> HttpResponse:
    """Count the tokens of the prompt that a request to /v1/responses would have."""
    frontend_of(request).check_model(body.model)
    return json_response(api.InputTokens(await read_texts(request, body)))


def _new_response(
    id: str, created: int, facts: Facts, body: api.ResponsesRequest, *, stored: bool
) -> api.Response:
    """The answer before it has any output."""
    defaults = facts.defaults
    effort = body.reasoning.effort if body.reasoning else None
    text = body.text.model_dump(exclude_none=True) if body.text else {}
    return api.Response(
        id=id,
        created_at=created,
        conversation={"id": body.conversation_id} if body.conversation_id else UNSET,
        model=facts.model_names[0],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": effort, "summary": None},
        safety_identifier=body.safety_identifier,
        store=stored,
        temperature=_first(body.temperature, defaults.get("temperature"), 1.0),
        text={"format": {"type": "text"}, **text},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=_first(body.top_p, defaults.get("top_p"), 1.0),
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


class ResponseWriter(EventWriter[api.OutputItem]):
    """Writes an answer as items."""

    def __init__(self, head: ConversationHead, body: api.ResponsesRequest, *, stored: bool) -> None:
        super().__init__(head, new_call_id(head.dialect))
        self._response = _new_response(head.id, head.created, head.facts, body, stored=stored)
        self._body = body
        self._number = 0
        self.logprobs = TextTokens[ChatTokenLogprob]()

    @property
    def answer(self) -> api.Response:
        return self._response

    def push(self, part: Part) -> bytes:
        if self._body.wants_logprobs:
            delta = part.delta
            entries = chat_logprobs(delta.token_ids, delta.logprobs, self._head.names)
            self.logprobs.add(entries, delta.widths)
        return super().push(part)

    def failed(self, error: ApiError) -> bytes:
        if not self._begun:
            self._begin()
        self._open = None  # an item that is not done is not part of the answer
        busy = isinstance(error, Overloaded | TooManyRequests)
        code = "rate_limit_exceeded" if busy else "invalid_prompt" if error.status < 500 else "server_error"
        self._end("failed", error=api.ResponseError(code, error.message))
        self.ended = True
        return self._last_events()

    def change(self, **fields: Any) -> None:
        """Have the end of the answer say something else in some fields."""
        self._response = replace(self._response, **fields)

    def last_events(self, end: End) -> bytes:
        return self._last_events()

    def _last_events(self) -> bytes:
        self._tell(f"response.{self._response.status}")
        return self._take_events()

    def emit(self, event: str, **fields: Any) -> None:
        """Add an event of the item that is written."""
        index = len(self.items)
        self._events.append(
            named_event(
                event, api.ItemEvent(type=event, sequence_number=self._next(), output_index=index, **fields)
            )
        )

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _tell(self, event: str) -> None:
        """Add an event of the whole response."""
        message = api.ResponseEvent(type=event, sequence_number=self._next(), response=self._response)
        self._events.append(named_event(event, message))

    def _begin(self) -> None:
        self._tell("response.created")
        self._tell("response.in_progress")

    def _new_text(self, kind: Kind) -> OpenItem[api.OutputItem]:
        return _Passage(self, kind, seals=self._body.seals_reasoning)

    def _new_call(self, name: str, id: str) -> OpenItem[api.OutputItem]:
        called = self._body.known_tools.client_name(name)
        item = api.OutputItem(
            id=_new_id("ctc" if called.is_custom else "fc"),
            type="custom_tool_call" if called.is_custom else "function_call",
            status="in_progress",
            call_id=id,
            name=called.name,
            namespace=called.namespace or UNSET,
        )
        return _Call(self, item, CustomToolInput() if called.is_custom else None)

    def _finish(self, part: Part) -> None:
        reason = part.delta.finish_reason or "stop"
        breaks_off = self._open is not None and self._open.kind == "call"
        self._close("completed" if reason == "stop" and not breaks_off else "incomplete")
        if reason == "stop":
            self._end("completed", completed_at=int(time.time()))
        else:
            why = "max_output_tokens" if reason == "length" else reason
            self._end("incomplete", incomplete_details=api.IncompleteDetails(why))

    def _end(self, status: str, **fields: Any) -> None:
        self._response = replace(
            self._response, status=status, output=self.items, usage=self._usage(), **fields
        )

    def _usage(self) -> api.ResponseUsage:
        counts = self._counts
        return api.ResponseUsage(
            input_tokens=counts.prompt,
            input_tokens_details=api.InputTokensDetails(counts.cached),
            output_tokens=counts.output,
            output_tokens_details=api.OutputTokensDetails(counts.reasoning or 0),
            total_tokens=counts.prompt + counts.output,
        )


class _Passage(OpenItem[api.OutputItem]):
    """A message or a reasoning while it is written."""

    def __init__(self, writer: ResponseWriter, kind: Kind, *, seals: bool) -> None:
        self.kind = kind
        self._writer = writer
        self._is_message = kind == "text"
        self._seals = seals and not self._is_message
        self._pieces: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._event = "response.output_text" if self._is_message else "response.reasoning_text"
        self._item = api.OutputItem(
            id=_new_id("msg" if self._is_message else "rs"),
            type="message" if self._is_message else "reasoning",
            status="in_progress",
            role="assistant" if self._is_message else UNSET,
            summary=UNSET if self._is_message else [],
            content=[],
        )

    def begin(self) -> None:
        self._writer.emit("response.output_item.added", item=self._item)
        self._emit("response.content_part.added", part=self._part(""))

    def push(self, text: str) -> None:
        if not self._is_message:
            self._writer.logprobs.clear()
        if not text:
            return
        self._pieces.append(text)
        if self._is_message:
            logprobs = self._writer.logprobs.take(text)
            self._logprobs += logprobs
            self._emit(f"{self._event}.delta", delta=text, logprobs=logprobs)
        else:
            self._emit(f"{self._event}.delta", delta=text)

    def end(self, status: str) -> api.OutputItem:
        text = "".join(self._pieces)
        part = self._part(text)
        logprobs = {"logprobs": self._logprobs} if self._is_message else {}
        self._emit(f"{self._event}.done", text=text, **logprobs)
        self._emit("response.content_part.done", part=part)
        item = replace(self._item, status=status, content=[part])
        if self._seals:
            item.encrypted_content = seal(text)
        self._writer.emit("response.output_item.done", item=item)
        return item

    def _part(self, text: str) -> api.OutputText | api.ReasoningText:
        if self._is_message:
            return api.OutputText(text=text, logprobs=self._logprobs.copy())
        return api.ReasoningText(text=text)

    def _emit(self, event: str, **fields: Any) -> None:
        self._writer.emit(event, item_id=self._item.id, content_index=0, **fields)


class _Call(OpenItem[api.OutputItem]):
    """A call of a function, or of a custom tool, whose input is free text, while it is written."""

    kind = "call"

    def __init__(
        self, writer: ResponseWriter, item: api.OutputItem, free_text: CustomToolInput | None
    ) -> None:
        self._writer, self._item, self._custom_input = writer, item, free_text
        if free_text is None:
            item.arguments = ""
        else:
            item.input = ""
        self._pieces: list[str] = []

    def begin(self) -> None:
        self._writer.emit("response.output_item.added", item=self._item)

    def push(self, text: str) -> None:
        self._tell(text if self._custom_input is None else self._custom_input.push(text))

    def end(self, status: str) -> api.OutputItem:
        if self._custom_input is not None:
            self._tell(self._custom_input.end())
        text = "".join(self._pieces)
        if self._custom_input is None:
            item = replace(self._item, status=status, arguments=text)
            self._emit("response.function_call_arguments.done", name=item.name, arguments=text)
        else:
            item = replace(self._item, status=status, input=text)
            self._emit("response.custom_tool_call_input.done", input=text)
        self._writer.emit("response.output_item.done", item=item)
        return item

    def _tell(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            what = "function_call_arguments" if self._custom_input is None else "custom_tool_call_input"
            self._emit(f"response.{what}.delta", delta=text)

    def _emit(self, event: str, **fields: Any) -> None:
        self._writer.emit(event, item_id=self._item.id, **fields)


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
