"""POST /v1/responses: an answer as a list of items, whole or streamed as events. Nothing is kept of it."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse

from server.api.conversations.response import InputTokens, Response
from server.api.conversations.response_items import KEPT_NOWHERE
from server.api.conversations.responses import ResponsesRequest
from server.errors import NotFound
from server.http.endpoint import Endpoint
from server.http.sse import EventStream, StreamForm, json_response
from server.reading.readings import INPUT_TOKENS, RESPONSES
from server.routes.conversations.response_writer import ResponseWriter
from server.routes.conversations.turn import Turn, begin_turn, events_of
from server.routes.generation import ENTRY, GENERATES, answer, config_of, frontend_of
from server.routes.read import read

router = APIRouter(route_class=Endpoint, tags=["generate"])


@router.post("/v1/responses", dependencies=GENERATES)
async def create_response(body: ResponsesRequest, request: Request) -> HttpResponse:
    """Answer a conversation with items: messages, reasoning and calls."""
    turn = await begin_turn(request, body, body.chat, RESPONSES, "resp_")
    writer = ResponseWriter(turn, body, _begun(turn, body))
    if not body.stream:
        return turn.warn(await answer(request, _whole(turn, writer)))
    job, silence = turn.job, config_of(request).sse_keep_alive_interval
    form = StreamForm(is_last=lambda data: writer.ended, error_event=writer.failed)
    events = events_of(turn, writer.push)
    stream = EventStream(events, silence, job.times.expected_header, job.set_paused, form, job.tell_wait)
    return turn.warn(stream)


@router.post("/v1/responses/input_tokens", dependencies=ENTRY)
async def count_input_tokens(body: ResponsesRequest, request: Request) -> HttpResponse:
    """Count the tokens of the prompt that a request to /v1/responses would have."""
    frontend_of(request).check_model(body.model)
    return json_response(InputTokens(await read(request, body, INPUT_TOKENS)))


@router.get("/v1/responses/{response_id}")
@router.delete("/v1/responses/{response_id}")
@router.post("/v1/responses/{response_id}/cancel")
@router.get("/v1/responses/{response_id}/input_items")
async def find_response(response_id: str) -> HttpResponse:
    """Answer 404: no response is kept."""
    raise NotFound(f"There is no response {response_id[:64]!r}: {KEPT_NOWHERE}", "response_id")


def _begun(turn: Turn, body: ResponsesRequest) -> Response:
    """The answer before it has any output."""
    job, defaults = turn.job, turn.job.frontend.facts.defaults
    effort = body.reasoning.effort if body.reasoning else None
    text = body.text.model_dump(exclude_none=True) if body.text else {}
    return Response(
        id=job.id,
        created_at=job.created,
        model=job.model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": effort, "summary": None},
        safety_identifier=body.safety_identifier,
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


async def _whole(turn: Turn, writer: ResponseWriter) -> Response:
    async with aclosing(events_of(turn, writer.push)) as events:
        async for _ in events:
            pass
    return writer.response
