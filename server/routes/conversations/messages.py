"""POST /v1/messages, as Anthropic's API has it: an answer as content blocks, whole or streamed as events."""

from __future__ import annotations

import hashlib
import secrets
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from server.errors import ApiError, anthropic_error
from server.frontend.asks.answers import Converse
from server.frontend.asks.parts import ConversationHead, Part, Terms
from server.http.endpoint import Endpoint
from server.http.sse import encode, json_response, named_event
from server.options.server_flags import ServerConfig
from server.reading.prompts import Conversation
from server.routes.answering import ask, new_call_id, object_of, read_texts, respond
from server.routes.chat import read_chat
from server.routes.conversations.event_writer import EventWriter, Kind, OpenItem
from server.routes.request_context import frontend_of
from server.schemas.conversations import anthropic_message as api
from server.schemas.conversations.anthropic import CountTokensRequest, MessagesRequest
from server.schemas.conversations.transcript import seal

router = APIRouter(route_class=Endpoint, tags=["Chat"])

PING = named_event("ping", api.MessageEvent(type="ping"))


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation with content blocks: texts, thinking and uses of tools."""
    longest = frontend_of(request).facts.max_model_len
    answer = await ask(request, body, body.chat.terms, "msg_", partial(read_message, body, longest))
    return await respond(request, answer, MessageWriter(answer.head, body), stream=bool(body.stream))


def read_message(
    body: MessagesRequest, longest: int, conversation: Conversation, terms: Terms, config: ServerConfig
) -> Converse:
    """What a request for a message asks for, of a model whose prompt and answer have `longest` tokens."""
    # Clients ask for as much as Anthropic's models can answer, whatever the window is here.
    most = max(1, min(body.max_tokens, longest))
    chat = body.chat.model_copy(update={"max_completion_tokens": most})
    return replace(read_chat(chat, conversation, terms, config), counts_output=body.max_tokens > 0)


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Count the tokens of the prompt that a request to /v1/messages would have."""
    frontend_of(request).check_model(body.model)
    return json_response(api.TokenCount(await read_texts(request, body)))


class MessageWriter(EventWriter[api.Block]):
    """Writes an answer as content blocks."""

    ping = PING

    def __init__(self, head: ConversationHead, body: MessagesRequest) -> None:
        new_id = new_call_id(head.dialect) if head.dialect == "mistral" else _new_id
        super().__init__(head, new_id, shows_output=body.max_tokens > 0)
        self._body = body
        self._stop = api.Stop(stop_reason="end_turn")

    @property
    def answer(self) -> api.AnthropicMessage:
        return api.AnthropicMessage(
            id=self._head.id,
            model=self._head.model,
            content=self.items,
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=self._usage(),
        )

    def failed(self, error: ApiError) -> bytes:
        self.ended = True
        return b"event: error\ndata: %s\n\n" % encode(anthropic_error(error.status, error.message))

    def emit(self, event: str, **fields: Any) -> None:
        self._events.append(named_event(event, api.MessageEvent(type=event, **fields)))

    def _begin(self) -> None:
        # How many tokens came with the first part is chance; the last event counts them all.
        usage = replace(self._usage(), output_tokens=0, output_tokens_details=api.OutputTokensDetails(0))
        self.emit(
            "message_start",
            message=api.AnthropicMessage(id=self._head.id, model=self._head.model, usage=usage),
        )
        self._events.append(PING)

    def _new_text(self, kind: Kind) -> OpenItem[api.Block]:
        if kind == "text":
            return _OpenBlock(self, kind, api.Block(type="text", text=""))
        hides = self._body.hides_thinking
        return _OpenBlock(self, kind, api.Block(type="thinking", thinking="", signature=""), hides=hides)

    def _new_call(self, name: str, id: str) -> OpenItem[api.Block]:
        return _OpenBlock(self, "call", api.Block(type="tool_use", id=id, name=name, input={}))

    def _finish(self, part: Part) -> None:
        self._close()
        self._stop = self._why(part)
        self.emit("message_delta", delta=self._stop, usage=self._usage())
        self.emit("message_stop")

    def _why(self, part: Part) -> api.Stop:
        delta = part.delta
        if delta.finish_reason == "length" or not self._body.max_tokens:
            counts, limit = part.counts, self._head.facts.max_model_len
            full = counts.output < self._body.max_tokens and counts.prompt + counts.output >= limit
            return api.Stop(stop_reason="model_context_window_exceeded" if full else "max_tokens")
        if part.has_calls:
            return api.Stop(stop_reason="tool_use")
        if isinstance(delta.stop_reason, str):
            return api.Stop(stop_reason="stop_sequence", stop_sequence=delta.stop_reason)
        return api.Stop(stop_reason="end_turn")

    def _usage(self) -> api.MessageUsage:
        counts = self._counts
        return api.MessageUsage(
            input_tokens=counts.prompt - counts.cached,
            cache_read_input_tokens=counts.cached,
            output_tokens=counts.output,
            output_tokens_details=api.OutputTokensDetails(counts.reasoning or 0),
        )


class _OpenBlock(OpenItem[api.Block]):
    """A block while it is written.

    Clients demand a signature of thinking; of thinking that is hidden the signature holds the text.
    """

    def __init__(self, writer: MessageWriter, kind: Kind, begun: api.Block, *, hides: bool = False) -> None:
        self.kind = kind
        self._writer, self._begun, self._hides = writer, begun, hides
        self._index = len(writer.items)
        self._pieces: list[str] = []

    def begin(self) -> None:
        self._writer.emit("content_block_start", index=self._index, content_block=self._begun)

    def push(self, text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        match self.kind:
            case "text":
                self._tell(api.Block(type="text_delta", text=text))
            case "reasoning" if not self._hides:
                self._tell(api.Block(type="thinking_delta", thinking=text))
            case "call":
                self._tell(api.Block(type="input_json_delta", partial_json=text))
            case _:
                pass

    def end(self, status: str) -> api.Block:
        text = "".join(self._pieces)
        if self.kind == "text":
            block = replace(self._begun, text=text)
        elif self.kind == "call":
            block = replace(self._begun, input=object_of(text))
        else:
            digest = hashlib.sha256(text.encode()).hexdigest()
            signature = seal(text) if self._hides else f"facet-{digest}"
            self._tell(api.Block(type="signature_delta", signature=signature))
            block = replace(self._begun, thinking="" if self._hides else text, signature=signature)
        self._writer.emit("content_block_stop", index=self._index)
        return block

    def _tell(self, more: api.Block) -> None:
        self._writer.emit("content_block_delta", index=self._index, delta=more)


def _new_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"
