"""/v1/responses/{id}: responses that are kept for a while, or computed later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from server.access.request_state import state_of
from server.batches.bodies import Deleted
from server.batches.folder import FULL_DISK
from server.batches.response_events import follow
from server.batches.responses import KeptAnswer, KeptResponses, Turn
from server.errors import ApiError, BadRequest, HttpError, refused_if_full
from server.http.endpoint import Endpoint
from server.http.sse import EventStream, StreamForm, encode, json_response
from server.routes.batches import read_page
from server.routes.request_context import config_of
from server.schemas.conversations.responses import ResponsesRequest

router = APIRouter(route_class=Endpoint, tags=["Chat"])

T = TypeVar("T")


NOT_KEPT = "store: this response is not kept, because the server's folder takes no more"
NOT_ADDED = (
    "conversation: this response is not added to it, because it is gone, or the server's folder is full"
)

_log = logging.getLogger(__name__)


def kept_of(request: Request) -> KeptResponses:
    return request.scope["app"].state.runner.kept


async def keep_response(request: Request, id: str, answer: bytes) -> bool:
    """Keeps the response to a request, if that is possible: the client gets it all the same."""
    state = state_of(request.scope)
    return await _try(id, kept_of(request).keep, state.caller.key_name, id, bytes(state.continued), answer)


async def add_to_conversation(request: Request, id: str, answer: bytes) -> bool:
    """Adds the input of a request, and the output of its answer, to a conversation, if that is possible.

    A line of a batch leaves that to the batch.
    """
    state = state_of(request.scope)
    told = msgspec.json.decode(answer, type=KeptAnswer)
    turn = Turn(state.caller.key_name, id, bytes(state.sent), told)
    if state.keep_turn is not None:
        state.keep_turn(turn)
        return True
    return await _try(f"a response of {id}", kept_of(request).add_turn, turn)


async def _try(what: str, work: Callable[..., object], *given: object) -> bool:
    """Calls a function in a thread, and returns whether that was possible."""
    try:
        await asyncio.to_thread(work, *given)
    except (ApiError, OSError) as error:
        _log.warning("%s is not kept: %s", what, error)
        return False
    return True


def queue_response(request: Request, body: ResponsesRequest, id: str, answer: bytes) -> None:
    """Have a response computed later. It blocks."""
    state = state_of(request.scope)
    owner, asked = state.caller.key_name, bytes(state.continued)
    # What a conversation has by then is before it, and it is added to that.
    sent = bytes(state.sent) if body.conversation_id else None
    with refused_if_full(FULL_DISK):
        kept_of(request).queue(owner, id, asked, answer, streams=bool(body.stream), request=sent)


async def stream_response(request: Request, id: str, after: int = -1) -> EventStream:
    """Tells the events of a background response behind number `after`, as they come."""
    number, ended = await ask_kept(request, kept_of(request).streamed, id), False
    database = kept_of(request).folder.database

    async def events() -> AsyncGenerator[bytes]:
        nonlocal ended
        async with aclosing(follow(database, number, after)) as found:
            async for event, ended in found:  # noqa: B007
                yield event

    form = StreamForm(lambda data: ended, lambda error: b"event: error\ndata: %s\n\n" % encode(error.body()))
    return EventStream(events(), config_of(request).sse_keep_alive_interval, form=form)


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response() -> Response:
    """Refuse to compact: the path would be taken for that of a response, which takes other methods."""
    raise HttpError(404, "/v1/responses/compact is not served: there is no compaction of responses.")


@router.get("/v1/responses/{response_id}")
async def retrieve_response(response_id: str, request: Request) -> Response:
    """Return a stored response, or the state of a background one. With `stream`, its events."""
    asked, after = request.query_params, request.query_params.get("starting_after")
    if asked.get("stream") == "true":
        if after is not None and not (after.isdecimal() and len(after) < 10):
            raise BadRequest("starting_after is the number of an event, from 0 on.", "starting_after")
        return await stream_response(request, response_id, -1 if after is None else int(after))
    if after is not None:
        raise BadRequest("starting_after is for stream=true.", "starting_after")
    found = await ask_kept(request, kept_of(request).find, response_id)
    return Response(bytes(found.answer), media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a background response."""
    found = await ask_kept(request, kept_of(request).cancel, response_id)
    request.scope["app"].state.runner.wake()
    return Response(bytes(found.answer), media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a stored response."""
    await ask_kept(request, kept_of(request).delete, response_id)
    request.scope["app"].state.runner.wake()
    return json_response(Deleted(response_id, object="response"))


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, request: Request) -> Response:
    """List the input items of a response, the newest first. Parameters: `limit`, `order`, `after`."""
    asked = read_page(request, 20, 100)
    return json_response(await ask_kept(request, kept_of(request).input_page, response_id, asked))


async def ask_kept(request: Request, work: Callable[..., T], *given: object) -> T:
    """The result of a function of what is kept, called with the client's name and what is given."""
    with refused_if_full(FULL_DISK):
        return await asyncio.to_thread(work, state_of(request.scope).caller.key_name, *given)
