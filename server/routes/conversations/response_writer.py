"""Writes an answer as the items of POST /v1/responses, and as the events that tell of them one by one.

Whole answers are made of the same events, which nobody then sends: so both say the same, under the same ids.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from msgspec import UNSET

from server.answers.answer_parts import AnswerPart, Arguments, CallBegun, CallEnded, Reasoning, Text
from server.answers.answer_reader import CustomToolInput
from server.api.conversations.response import (
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
)
from server.api.conversations.responses import ResponsesRequest
from server.api.conversations.transcript import seal
from server.api.logprobs import ChatTokenLogprob, chat_logprobs
from server.errors import ApiError, Overloaded, TooManyRequests
from server.frontend.frontend import Delta
from server.http.sse import named_event
from server.routes.chat_message import new_call_id
from server.routes.conversations.turn import Turn, TurnParts


class ResponseWriter:
    """Writes one answer."""

    def __init__(self, turn: Turn, body: ResponsesRequest, begun: Response) -> None:
        """`begun` is the answer before it has any output."""
        self.response = begun
        self.ended = False
        self._turn = turn
        self._body = body
        self._parts = TurnParts(turn)
        self._new_call_id = new_call_id(turn.dialect)
        self._events: list[bytes] = []
        self._number = 0
        self._open: _Item | None = None
        self._logprobs: list[tuple[ChatTokenLogprob, int]] = []
        """Logprobs of tokens whose text has not come yet, and the characters of each."""

    def push(self, delta: Delta) -> bytes:
        """The events that a delta makes."""
        if not self._number:
            self._begin()
        if self._body.wants_logprobs and delta.token_ids:
            entries = chat_logprobs(delta.token_ids, delta.logprobs, self._turn.job.names)
            widths = [*delta.widths, *[0] * len(entries)]  # a token that is not shown has none
            self._logprobs += zip(entries, widths, strict=False)
        for part in self._parts.read(delta):
            self._take(part)
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason)
        return self._take_events()

    def failed(self, error: ApiError) -> bytes:
        """The events that end a stream which breaks off."""
        if not self._number:
            self._begin()
        self._open = None  # an item that is not done is not part of the answer
        busy = isinstance(error, Overloaded | TooManyRequests)
        code = "rate_limit_exceeded" if busy else "invalid_prompt" if error.status < 500 else "server_error"
        self._end("failed", error=ResponseError(code, error.message))
        return self._take_events()

    def emit(self, event: str, **fields: Any) -> None:
        """Add an event of the item that is written."""
        index = len(self.response.output)
        self._events.append(
            named_event(
                event, ItemEvent(type=event, sequence_number=self._next(), output_index=index, **fields)
            )
        )

    def take_logprobs(self, text: str) -> list[ChatTokenLogprob]:
        """The logprobs of the tokens that came last and make up this text. Markup was before them."""
        waiting, self._logprobs = self._logprobs, []
        if self._turn.format is None:
            return [entry for entry, _ in waiting]
        first, missing = len(waiting), len(text)
        while first and missing > 0:
            first -= 1
            missing -= waiting[first][1]
        return [entry for entry, _ in waiting[first:]]

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _take_events(self) -> bytes:
        taken = b"".join(self._events)
        self._events.clear()
        return taken

    def _tell(self, event: str) -> None:
        """Add an event of the whole response."""
        message = ResponseEvent(type=event, sequence_number=self._next(), response=self.response)
        self._events.append(named_event(event, message))

    def _begin(self) -> None:
        self._tell("response.created")
        self._tell("response.in_progress")

    def _take(self, part: AnswerPart) -> None:
        match part:
            case Text(text):
                self._passage("message", text)
            case Reasoning(text):
                self._passage("reasoning", text)
                self._logprobs.clear()
            case CallBegun(_, name, id):
                called = self._body.known_tools.client_name(name)
                item = OutputItem(
                    id=_new_id("ctc" if called.is_custom else "fc"),
                    type="custom_tool_call" if called.is_custom else "function_call",
                    status="in_progress",
                    call_id=id or self._new_call_id(),
                    name=called.name,
                    namespace=called.namespace or UNSET,
                )
                self._switch(_CustomCall(self, item) if called.is_custom else _Call(self, item))
            case Arguments(_, text):
                if self._open is not None:
                    self._open.push(text)
            case CallEnded():
                self._close("completed")

    def _passage(self, kind: str, text: str) -> None:
        if not isinstance(self._open, _Passage) or self._open.item.type != kind:
            self._switch(_Passage(self, kind, seals=self._body.seals_reasoning))
        if self._open is not None:
            self._open.push(text)

    def _switch(self, item: _Item) -> None:
        self._close("completed")
        self._open = item
        item.begin()

    def _close(self, status: str) -> None:
        if self._open is not None:
            item, self._open = self._open.end(status), None
            self.response = msgspec.structs.replace(self.response, output=[*self.response.output, item])

    def _finish(self, reason: str) -> None:
        if self._open is None and not self.response.output:
            self._passage("message", "")
        self._close("completed" if reason == "stop" else "incomplete")
        if reason == "stop":
            self._end("completed", completed_at=int(time.time()))
        else:
            why = "max_output_tokens" if reason == "length" else reason
            self._end("incomplete", incomplete_details=IncompleteDetails(why))

    def _end(self, status: str, **fields: Any) -> None:
        self.ended = True
        self.response = msgspec.structs.replace(self.response, status=status, usage=self._usage(), **fields)
        self._tell(f"response.{status}")

    def _usage(self) -> ResponseUsage:
        counts = self._turn.job.counts
        return ResponseUsage(
            input_tokens=counts.prompt,
            input_tokens_details=InputTokensDetails(counts.cached),
            output_tokens=counts.output,
            output_tokens_details=OutputTokensDetails(self._parts.reasoning_tokens),
            total_tokens=counts.prompt + counts.output,
        )


class _Passage:
    """A message or a reasoning while it is written."""

    def __init__(self, writer: ResponseWriter, kind: str, *, seals: bool) -> None:
        self._writer = writer
        self._is_message = kind == "message"
        self._seals = seals and not self._is_message
        self._pieces: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._event = "response.output_text" if self._is_message else "response.reasoning_text"
        self.item = OutputItem(
            id=_new_id("msg" if self._is_message else "rs"), type=kind, status="in_progress", content=[]
        )
        if self._is_message:
            self.item.role = "assistant"
        else:
            self.item.summary = []

    def begin(self) -> None:
        self._writer.emit("response.output_item.added", item=self.item)
        self._emit("response.content_part.added", part=self._part(""))

    def push(self, text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        if self._is_message:
            logprobs = self._writer.take_logprobs(text)
            self._logprobs += logprobs
            self._emit(f"{self._event}.delta", delta=text, logprobs=logprobs)
        else:
            self._emit(f"{self._event}.delta", delta=text)

    def end(self, status: str) -> OutputItem:
        text = "".join(self._pieces)
        part = self._part(text)
        logprobs = {"logprobs": self._logprobs} if self._is_message else {}
        self._emit(f"{self._event}.done", text=text, **logprobs)
        self._emit("response.content_part.done", part=part)
        item = msgspec.structs.replace(self.item, status=status, content=[part])
        if self._seals:
            item.encrypted_content = seal(text)
        self._writer.emit("response.output_item.done", item=item)
        return item

    def _part(self, text: str) -> OutputText | ReasoningText:
        if self._is_message:
            return OutputText(text=text, logprobs=self._logprobs.copy())
        return ReasoningText(text=text)

    def _emit(self, event: str, **fields: Any) -> None:
        self._writer.emit(event, item_id=self.item.id, content_index=0, **fields)


class _Call:
    """A call of a function while it is written."""

    def __init__(self, writer: ResponseWriter, item: OutputItem) -> None:
        item.arguments = ""
        self._writer = writer
        self._pieces: list[str] = []
        self.item = item

    def begin(self) -> None:
        self._writer.emit("response.output_item.added", item=self.item)

    def push(self, text: str) -> None:
        self._pieces.append(text)
        if text:
            self._emit("response.function_call_arguments.delta", delta=text)

    def end(self, status: str) -> OutputItem:
        item = msgspec.structs.replace(self.item, status=status, arguments="".join(self._pieces))
        self._emit("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        self._writer.emit("response.output_item.done", item=item)
        return item

    def _emit(self, event: str, **fields: Any) -> None:
        self._writer.emit(event, item_id=self.item.id, **fields)


class _CustomCall:
    """A call of a custom tool while it is written."""

    def __init__(self, writer: ResponseWriter, item: OutputItem) -> None:
        item.input = ""
        self._writer = writer
        self._input = CustomToolInput()
        self.item = item

    def begin(self) -> None:
        self._writer.emit("response.output_item.added", item=self.item)

    def push(self, text: str) -> None:
        self._tell(self._input.push(text))

    def end(self, status: str) -> OutputItem:
        self._tell(self._input.end())
        item = msgspec.structs.replace(self.item, status=status, input=self._input.text)
        self._writer.emit("response.custom_tool_call_input.done", item_id=item.id, input=item.input)
        self._writer.emit("response.output_item.done", item=item)
        return item

    def _tell(self, text: str) -> None:
        if text:
            self._writer.emit("response.custom_tool_call_input.delta", item_id=self.item.id, delta=text)


_Item = _Passage | _Call | _CustomCall


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
