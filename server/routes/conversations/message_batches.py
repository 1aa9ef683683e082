"""/v1/messages/batches: many requests to /v1/messages, answered in the time that others leave."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import StreamingResponse

from server.batches import message_batches as api
from server.batches.database import Damaged
from server.batches.folder import FULL_DISK, not_found
from server.batches.records import StoredBatch
from server.errors import HttpError, refused_if_full
from server.http.connection.body_limits import MOST_MESSAGES, read_body
from server.http.endpoint import Endpoint, require_json
from server.http.sse import json_response
from server.routes.batches import folder_of, listed, owner_of, read_page, runner_of

router = APIRouter(route_class=Endpoint, tags=["Files and batches"])


@router.post("/v1/messages/batches", dependencies=[Depends(require_json)])
async def create_message_batch(request: Request) -> Response:
    """Start a batch of messages. Each request has a `custom_id` and, as `params`, a body of /v1/messages."""
    raw = await read_body(request.receive, most=MOST_MESSAGES)
    with refused_if_full(FULL_DISK):
        id = await asyncio.to_thread(api.create, folder_of(request), owner_of(request), raw)
    runner_of(request).wake()
    return json_response(api.shown(await _find(request, id)))


@router.get("/v1/messages/batches")
async def list_message_batches(request: Request) -> Response:
    """List the batches of messages, the newest first. Parameters: `limit`, `after_id`, `before_id`."""
    batches, asked = runner_of(request).batches, request.query_params
    before, after = asked.get("before_id"), asked.get("after_id")
    page = read_page(request, 20, 1000)._replace(after=before or after or None, newest_first=not before)
    found, more = await asyncio.to_thread(batches.page, owner_of(request), page, api.PREFIX)
    return listed([api.shown(each) for each in (reversed(found) if before else found)], more)


@router.get("/v1/messages/batches/{message_batch_id}")
async def retrieve_message_batch(message_batch_id: str, request: Request) -> Response:
    """Show a batch of messages and its progress."""
    return json_response(api.shown(await _find(request, message_batch_id)))


@router.get("/v1/messages/batches/{message_batch_id}/results")
async def message_batch_results(message_batch_id: str, request: Request) -> Response:
    """Download the results of a batch of messages that has ended, a line of JSON for each request."""
    batch = await _find(request, message_batch_id)
    try:
        found = await asyncio.to_thread(api.results, folder_of(request), batch)
    except Damaged as damage:
        raise HttpError(500, f"{damage.message}.") from None
    return StreamingResponse(found, media_type="application/x-jsonl")


@router.post("/v1/messages/batches/{message_batch_id}/cancel")
async def cancel_message_batch(message_batch_id: str, request: Request) -> Response:
    """Cancel a batch of messages. What was computed is among its results."""
    await _find(request, message_batch_id)
    with refused_if_full(FULL_DISK):
        cancel = runner_of(request).batches.cancel
        found = await asyncio.to_thread(cancel, message_batch_id, owner_of(request))
    runner_of(request).wake()
    return json_response(api.shown(found))


@router.delete("/v1/messages/batches/{message_batch_id}")
async def delete_message_batch(message_batch_id: str, request: Request) -> Response:
    """Delete a batch of messages that has ended, and its results."""
    batch = await _find(request, message_batch_id)
    with refused_if_full(FULL_DISK):
        await asyncio.to_thread(api.delete, folder_of(request), batch)
    return json_response(api.DeletedBatch(message_batch_id))


async def _find(request: Request, id: str) -> StoredBatch:
    if not id.startswith(api.PREFIX):
        raise not_found("batch", id)
    return await asyncio.to_thread(runner_of(request).batches.find, id, owner_of(request))
