"""/v1/responses/{id}: responses that are kept for a while, or computed later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from server.access.request_state import state_of
from server.batches.bodies import Deleted, Page
from server.batches.folder import FULL_DISK
from server.batches.responses import KeptAnswer, KeptResponses, follow, items_of
from server.errors import ApiError, BadRequest, refused_if_full
from server.http.endpoint import Endpoint
from server.http.sse import EventStream, StreamForm, encode, json_response
from server.routes.request_context import config_of
from server.schemas.conversations.responses import ResponsesRequest

router = APIRouter(route_class=Endpoint, tags=["Chat"])

T = TypeVar("T")


NOT_KEPT = "store: this response is not kept, because the server's folder takes no more"
NOT_ADDED = (
    "conversation: this response is not added to it, because it is gone, or the server's folder is full"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Keeps the response to one request."""

    _kept: KeptResponses
    _owner: str
    _asked: bytes

    def has_room(self) -> bool:
        """Whether a response can be kept, as far as that is known before it is written."""
        return self._kept.has_room()

    def keep(self, id: str, answer: bytes) -> bool:
        """Keeps the response, and returns whether that was possible: the client gets it all the same. Call it
        in a thread."""
        try:
            self._kept.keep(self._owner, id, self._asked, answer)
        except OSError as error:
            _log.warning("%s is not kept: %s", id, error.strerror)
            return False
        return True


def _kept_of(request: Request) -> KeptResponses:
    return request.scope["app"].state.runner.kept


def find_keeping(request: Request, body: ResponsesRequest) -> Keeping | None:
    """What keeps the response to a request, if it is to be kept."""
    kept = _kept_of(request)
    if kept.seconds is None or body.store is False:
        return None
    return Keeping(kept, state_of(request.scope).caller.key_name, bytes(state_of(request.scope).continued))


def check_conversation_room(request: Request) -> None:
    """Raises an error if the folder cannot take what a response adds to its conversation."""
    if not (kept := _kept_of(request)).has_room():
        raise kept.folder.full()


async def add_to_conversation(request: Request, id: str, answer: bytes) -> bool:
    """Adds the input of a request, and the output of its answer, to a conversation; returns whether that was
    possible: the client gets the answer all the same."""
    state = state_of(request.scope)
    items = [*items_of(bytes(state.sent)), *msgspec.json.decode(answer, type=KeptAnswer).output]
    add, decoded = _kept_of(request).conversations.add, map(msgspec.json.decode, items)
    try:
        await asyncio.to_thread(add, state.caller.key_name, id, list(decoded))
    except (ApiError, OSError) as error:
        _log.warning("a response is not added to %s: %s", id, error)
        return False
    return True


def queue_response(request: Request, body: ResponsesRequest, id: str, answer: bytes) -> None:
    """Have a response computed later. It blocks."""
    state = state_of(request.scope)
    owner, asked = state.caller.key_name, bytes(state.continued)
    # What a conversation has by then is before it, and it is added to that.
    sent = bytes(state.sent) if body.conversation_id else None
    with refused_if_full(FULL_DISK):
        _kept_of(request).queue(owner, id, asked, answer, streams=bool(body.stream), request=sent)


async def stream_response(request: Request, id: str, after: int = -1) -> EventStream:
    """Tells the events of a background response behind number `after`, as they come."""
    number, ended = await _ask(request, id, KeptResponses.streamed), False
    database = _kept_of(request).folder.database

    async def events() -> AsyncGenerator[bytes]:
        nonlocal ended
        async with aclosing(follow(database, number, after)) as found:
            async for event, ended in found:  # noqa: B007
                yield event

    form = StreamForm(lambda data: ended, lambda error: b"event: error\ndata: %s\n\n" % encode(error.body()))
    return EventStream(events(), config_of(request).sse_keep_alive_interval, form=form)


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
    found = await _ask(request, response_id, KeptResponses.find)
    return Response(bytes(found.answer), media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a background response."""
    found = await _ask(request, response_id, KeptResponses.cancel)
    request.scope["app"].state.runner.wake()
    return Response(bytes(found.answer), media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a stored response."""
    await _ask(request, response_id, KeptResponses.delete)
    request.scope["app"].state.runner.wake()
    return json_response(Deleted(response_id, object="response"))


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, request: Request) -> Response:
    """List the input items of a response, the newest first. Parameters: `limit`, `order`, `after`."""
    found = await _ask(request, response_id, KeptResponses.find)
    return page_of_items(
        request,
        [
            {"id": f"item_{index}", "type": "message", **msgspec.json.decode(item)}
            for index, item in enumerate(found.items)
        ],
    )


def page_of_items(request: Request, items: list[dict[str, Any]]) -> Response:
    """The part of a list of items that the query asks for."""
    asked = request.query_params
    limit, order = asked.get("limit") or "20", asked.get("order") or "desc"
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= 100 and order in ("asc", "desc")):
        raise BadRequest("limit is a number from 1 to 100, and order asc or desc.", "limit")
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    after = asked.get("after")
    if after:
        items = items[ids.index(after) + 1 :] if after in ids else []
    return write_page(items[: int(limit)], more=len(items) > int(limit))


def write_page(items: list[dict[str, Any]], *, more: bool) -> Response:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return json_response(Page[Any](data=items, first_id=first, last_id=last, has_more=more))


async def _ask(request: Request, id: str, work: Callable[[KeptResponses, str, str], T]) -> T:
    """The result of a function of the responses that are kept, called with the client's name and an id."""
    with refused_if_full(FULL_DISK):
        return await asyncio.to_thread(work, _kept_of(request), state_of(request.scope).caller.key_name, id)
