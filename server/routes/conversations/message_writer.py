"""Writes an answer as the content blocks of POST /v1/messages, and as the events that tell of them.

Whole answers are made of the same events, which nobody then sends: so both say the same.
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from typing import Any

from pydantic_core import from_json

from server.answers.answer_parts import AnswerPart, Arguments, CallBegun, CallEnded, Reasoning, Text
from server.api.conversations.anthropic import MessagesRequest
from server.api.conversations.anthropic_message import (
    AnthropicMessage,
    Block,
    BlockDelta,
    BlockMore,
    BlockStart,
    BlockStop,
    Event,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    Stop,
)
from server.api.conversations.transcript import seal
from server.errors import ApiError, anthropic_error
from server.frontend.frontend import Delta
from server.http.sse import encode
from server.routes.chat_message import new_call_id
from server.routes.conversations.turn import Turn, TurnParts

_TAGS: dict[type[Event], bytes] = {
    kind: str(kind.__struct_config__.tag).encode()
    for kind in (MessageStart, BlockStart, BlockMore, BlockStop, MessageDelta, MessageStop, Ping)
}


def event(message: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (_TAGS[type(message)], encode(message))


PING = event(Ping())


class MessageWriter:
    """Writes one answer."""

    def __init__(self, turn: Turn, body: MessagesRequest) -> None:
        self.ended = False
        self._turn = turn
        self._body = body
        self._parts = TurnParts(turn)
        self._new_call_id = new_call_id(turn.dialect) if turn.dialect == "mistral" else _new_id
        self._events: list[bytes] = []
        self._open: _Block | None = None
        self._content: list[Block] = []
        self._begun = False
        self._stop = Stop(stop_reason="end_turn", stop_sequence=None)

    @property
    def message(self) -> AnthropicMessage:
        """The whole answer, once it has ended."""
        job = self._turn.job
        return AnthropicMessage(
            id=job.id,
            model=job.model,
            content=self._content,
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=self._usage(),
        )

    def push(self, delta: Delta) -> bytes:
        """The events that a delta makes."""
        if not self._begun:
            self._begin()
        if self._body.max_tokens:
            for part in self._parts.read(delta):
                self._take(part)
        if delta.finish_reason is not None:
            self._finish(delta)
        return self._take_events()

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which breaks off."""
        self.ended = True
        return b"event: error\ndata: %s\n\n" % encode(anthropic_error(error.status, error.message))

    def emit(self, message: Event) -> None:
        self._events.append(event(message))

    def _take_events(self) -> bytes:
        taken = b"".join(self._events)
        self._events.clear()
        return taken

    def _begin(self) -> None:
        self._begun = True
        job = self._turn.job
        self.emit(MessageStart(message=AnthropicMessage(id=job.id, model=job.model, usage=self._usage())))
        self._events.append(PING)

    def _take(self, part: AnswerPart) -> None:
        match part:
            case Text(text):
                self._say(text)
            case Reasoning(text):
                self._think(text)
            case CallBegun(_, name, id):
                self._close()
                self._switch(_ToolUse(self, len(self._content), id=id or self._new_call_id(), name=name))
            case Arguments(_, text):
                self._push(text)
            case CallEnded():
                self._close()

    def _say(self, text: str) -> None:
        if not isinstance(self._open, _TextBlock):
            self._close()
            self._switch(_TextBlock(self, len(self._content)))
        self._push(text)

    def _think(self, text: str) -> None:
        if not isinstance(self._open, _ThinkingBlock):
            self._close()
            self._switch(_ThinkingBlock(self, len(self._content), hides=self._body.hides_thinking))
        self._push(text)

    def _push(self, text: str) -> None:
        if self._open is not None:
            self._open.push(text)

    def _switch(self, block: _Block) -> None:
        self._open = block
        block.begin()

    def _close(self) -> None:
        if self._open is not None:
            index = len(self._content)
            self._content.append(self._open.end())
            self._open = None
            self.emit(BlockStop(index=index))

    def _finish(self, delta: Delta) -> None:
        if self._open is None and not self._content and self._body.max_tokens:
            self._say("")
        self._close()
        self._stop = self._why(delta)
        self.emit(MessageDelta(delta=self._stop, usage=self._usage()))
        self.emit(MessageStop())
        self.ended = True

    def _why(self, delta: Delta) -> Stop:
        reason, sequence = "end_turn", None
        if delta.finish_reason == "length" or not self._body.max_tokens:
            counts, limit = self._turn.job.counts, self._turn.job.frontend.facts.max_model_len
            full = counts.output < self._body.max_tokens and counts.prompt + counts.output >= limit
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif self._parts.has_calls:
            reason = "tool_use"
        elif isinstance(delta.stop_reason, str):
            reason, sequence = "stop_sequence", delta.stop_reason
        return Stop(stop_reason=reason, stop_sequence=sequence)

    def _usage(self) -> MessageUsage:
        counts = self._turn.job.counts
        return MessageUsage(
            input_tokens=counts.prompt - counts.cached,
            cache_read_input_tokens=counts.cached,
            output_tokens=counts.output,
            output_tokens_details=OutputTokensDetails(self._parts.reasoning_tokens),
        )


class _Block(ABC):
    """A block while it is written."""

    def __init__(self, writer: MessageWriter, index: int) -> None:
        self._writer = writer
        self._index = index
        self._pieces: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def begin(self) -> None:
        self._writer.emit(BlockStart(index=self._index, content_block=self._first()))

    def push(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._tell(text)

    @abstractmethod
    def end(self) -> Block:
        """The whole block."""

    @abstractmethod
    def _first(self) -> Block:
        """The block as it begins."""

    @abstractmethod
    def _tell(self, text: str) -> None:
        """Tell of more of the block."""

    def _more(self, delta: BlockDelta) -> None:
        self._writer.emit(BlockMore(index=self._index, delta=delta))


class _TextBlock(_Block):
    def end(self) -> Block:
        return Block(type="text", text=self._text)

    def _first(self) -> Block:
        return Block(type="text", text="")

    def _tell(self, text: str) -> None:
        self._more(BlockDelta(type="text_delta", text=text))


class _ThinkingBlock(_Block):
    """Thinking, whose signature clients demand; of thinking that is hidden the signature holds the text."""

    def __init__(self, writer: MessageWriter, index: int, *, hides: bool) -> None:
        super().__init__(writer, index)
        self._hides = hides

    def end(self) -> Block:
        text = self._text
        digest = hashlib.sha256(text.encode()).hexdigest()
        signature = seal(text) if self._hides else f"facet-{digest}"
        self._more(BlockDelta(type="signature_delta", signature=signature))
        return Block(type="thinking", thinking="" if self._hides else text, signature=signature)

    def _first(self) -> Block:
        return Block(type="thinking", thinking="", signature="")

    def _tell(self, text: str) -> None:
        if not self._hides:
            self._more(BlockDelta(type="thinking_delta", thinking=text))


class _ToolUse(_Block):
    def __init__(self, writer: MessageWriter, index: int, *, id: str, name: str) -> None:
        super().__init__(writer, index)
        self._id, self._name = id, name

    def end(self) -> Block:
        return Block(type="tool_use", id=self._id, name=self._name, input=_object_of(self._text))

    def _first(self) -> Block:
        return Block(type="tool_use", id=self._id, name=self._name, input={})

    def _tell(self, text: str) -> None:
        self._more(BlockDelta(type="input_json_delta", partial_json=text))


def _object_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call; if they were cut, what is there of them, as clients read a stream."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _new_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"
