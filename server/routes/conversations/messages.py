"""POST /v1/messages, as Anthropic's API has it: an answer as content blocks, whole or streamed as events."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from server.api.conversations.anthropic import CountTokensRequest, MessagesRequest
from server.api.conversations.anthropic_message import AnthropicMessage, TokenCount
from server.http.endpoint import Endpoint
from server.http.sse import EventStream, StreamForm, json_response
from server.reading.readings import COUNT_TOKENS, MESSAGES
from server.routes.conversations.message_writer import PING, MessageWriter
from server.routes.conversations.turn import Turn, begin_turn, events_of
from server.routes.generation import ENTRY, GENERATES, answer, config_of, frontend_of
from server.routes.read import read

router = APIRouter(route_class=Endpoint, tags=["generate"])


@router.post("/v1/messages", dependencies=GENERATES)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation with content blocks: texts, thinking and uses of tools."""
    # Clients ask for as much as Anthropic's models can answer, whatever the window is here.
    most = max(1, min(body.max_tokens, frontend_of(request).facts.max_model_len))
    chat = body.chat.model_copy(update={"max_completion_tokens": most})
    turn = await begin_turn(request, body, chat, MESSAGES, "msg_", counts_output=body.max_tokens > 0)
    writer = MessageWriter(turn, body)
    if not body.stream:
        return turn.warn(await answer(request, _whole(turn, writer)))
    job, silence = turn.job, config_of(request).sse_keep_alive_interval
    form = StreamForm(lambda data: writer.ended, writer.failed, ping=PING)
    events = events_of(turn, writer.push)
    stream = EventStream(events, silence, job.times.expected_header, job.set_paused, form, job.tell_wait)
    return turn.warn(stream)


@router.post("/v1/messages/count_tokens", dependencies=ENTRY)
async def count_message_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Count the tokens of the prompt that a request to /v1/messages would have."""
    frontend_of(request).check_model(body.model)
    return json_response(TokenCount(await read(request, body, COUNT_TOKENS)))


async def _whole(turn: Turn, writer: MessageWriter) -> AnthropicMessage:
    async with aclosing(events_of(turn, writer.push)) as events:
        async for _ in events:
            pass
    return writer.message
