"""POST /v2/chat, as Cohere's API has it: thinking, texts, a plan and calls, whole or streamed as events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET
from msgspec.structs import replace

from server.errors import ApiError
from server.frontend.asks.answers import Converse
from server.frontend.asks.parts import ConversationHead, Part, Terms
from server.http.endpoint import Endpoint
from server.http.sse import encode
from server.options.server_flags import ServerConfig
from server.reading.prompts import Conversation
from server.routes.answering import ask, new_call_id, respond
from server.routes.chat import read_chat
from server.routes.conversations.event_writer import EventWriter, Kind, OpenItem, TextTokens
from server.schemas.conversations.cohere_chat import CohereAnswer, CohereChatRequest

router = APIRouter(route_class=Endpoint, tags=["Chat"])

Item = dict[str, Any]
"""A field of the message, and what an item adds to it."""


@router.post("/v2/chat")
@router.post("/cohere/v2/chat")
async def chat_for_cohere(body: CohereChatRequest, request: Request) -> Response:
    """Answer a conversation like Cohere's API."""
    answer = await ask(request, body, body.chat.terms, "", partial(read_cohere_chat, body))
    return await respond(request, answer, CohereWriter(answer.head, body), stream=bool(body.stream))


def read_cohere_chat(
    body: CohereChatRequest, conversation: Conversation, terms: Terms, config: ServerConfig
) -> Converse:
    """What Cohere's request asks for."""
    return replace(read_chat(body.chat, conversation, terms, config), token_by_token=bool(body.logprobs))


class CohereWriter(EventWriter[Item]):
    """Writes an answer as the fields of a message."""

    def __init__(self, head: ConversationHead, body: CohereChatRequest) -> None:
        super().__init__(head, new_call_id(head.dialect))
        self._body, self._reason = body, "ERROR"
        self._tokens = TextTokens[tuple[int, float]]()
        self._logprobs: list[dict[str, Any]] = []

    @property
    def answer(self) -> CohereAnswer:
        message: dict[str, Any] = {"role": "assistant"}
        for item in self.items:
            for field, value in item.items():
                if field == "tool_plan":
                    message[field] = message.get(field, "") + value
                else:
                    message.setdefault(field, []).append(value)
        return CohereAnswer(
            id=self._head.id,
            finish_reason=self._reason,
            message=message,
            usage=self._usage(),
            logprobs=self._logprobs if self._body.logprobs else UNSET,
        )

    def push(self, part: Part) -> bytes:
        if self._body.logprobs:
            values = [each.values[0] for each in part.delta.logprobs]
            self._tokens.add(zip(part.delta.token_ids, values, strict=True), part.delta.widths)
        return super().push(part)

    def failed(self, error: ApiError) -> bytes:
        if not self._begun:
            self._begin()
        self.ended = True
        self.emit("message-end", id=self._head.id, delta={"error": error.message, **self._end()})
        return self._take_events()

    def emit(self, event: str, **fields: Any) -> None:
        data = encode({"type": event, **fields})
        self._events.append(b"event: %s\ndata: %s\n\n" % (event.encode(), data))

    def logprobs_of(self, text: str) -> dict[str, Any]:
        """The field of an event with this text that tells the logprobs of its tokens, if asked for."""
        if not self._body.logprobs:
            return {}
        found = self._tokens.take(text)
        ids, values = [id for id, _ in found], [value for _, value in found]
        self._logprobs.append({"text": text, "token_ids": ids, "logprobs": values})
        return {"logprobs": self._logprobs[-1]}

    def _begin(self) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": []}
        self.emit("message-start", id=self._head.id, delta={"message": message})

    def _new_text(self, kind: Kind) -> OpenItem[Item]:
        if kind == "reasoning" and self._body.plans:
            return _Item(self, kind, "tool_plan", str, str)
        name = "text" if kind == "text" else "thinking"
        return _Item(
            self, kind, "content", lambda text: {"type": name, name: text}, lambda text: {name: text}
        )

    def _new_call(self, name: str, id: str) -> OpenItem[Item]:
        def whole(text: str) -> dict[str, Any]:
            return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}

        return _Item(self, "call", "tool_calls", whole, lambda text: {"function": {"arguments": text}})

    def _finish(self, part: Part) -> None:
        self._close()
        match self._head.finish_reason(part):
            case "length":
                self._reason = "MAX_TOKENS"
            case _ if part.has_calls:
                self._reason = "TOOL_CALL"
            case _:
                stopped = isinstance(part.delta.stop_reason, str)
                self._reason = "STOP_SEQUENCE" if stopped else "COMPLETE"
        self.emit("message-end", id=self._head.id, delta=self._end())

    def _end(self) -> dict[str, Any]:
        return {"finish_reason": self._reason, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        counted = {"input_tokens": self._counts.prompt, "output_tokens": self._counts.output}
        return {"billed_units": counted, "tokens": counted, "cached_tokens": self._counts.cached}


class _Item(OpenItem[Item]):
    """An item while it is written. No event tells that a plan begins or ends."""

    def __init__(
        self,
        writer: CohereWriter,
        kind: Kind,
        field: str,
        whole: Callable[[str], Any],
        more: Callable[[str], Any],
    ) -> None:
        """`whole` makes of a text what the message has in its `field`, and `more` what an event adds."""
        self.kind = kind
        self._writer, self._field, self._whole, self._more = writer, field, whole, more
        self._event = {"tool_plan": "tool-plan", "tool_calls": "tool-call"}.get(field, field)
        is_plan = field == "tool_plan"
        self._place = {} if is_plan else {"index": sum(field in item for item in writer.items)}
        self._text = ""

    def begin(self) -> None:
        if self._place:
            self._tell("start", self._whole(""))

    def push(self, text: str) -> None:
        if text:
            self._text += text
            logprobs = self._writer.logprobs_of(text) if self._field == "content" else {}
            self._tell("delta", self._more(text), **logprobs)

    def end(self, status: str) -> Item:
        if self._place:
            self._writer.emit(f"{self._event}-end", **self._place)
        return {self._field: self._whole(self._text)}

    def _tell(self, step: str, value: Any, **more: Any) -> None:
        delta = {"message": {self._field: value}}
        self._writer.emit(f"{self._event}-{step}", **self._place, delta=delta, **more)
