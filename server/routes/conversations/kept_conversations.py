"""/v1/conversations: lists of items that are kept, which responses continue and add to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from server.access.request_state import state_of
from server.batches.bodies import ConversationItems, ConversationRequest, ConversationUpdate, Deleted
from server.batches.conversations import Conversations
from server.batches.folder import FULL_DISK
from server.errors import refused_if_full
from server.http.endpoint import Endpoint, require_json
from server.http.sse import json_response
from server.routes.conversations.kept_responses import page_of_items, write_page

router = APIRouter(route_class=Endpoint, tags=["Chat"])

T = TypeVar("T")
_JSON = [Depends(require_json)]


@router.post("/v1/conversations", dependencies=_JSON)
async def create_conversation(body: ConversationRequest, request: Request) -> Response:
    """Create a conversation, which `conversation` in /v1/responses continues."""
    return json_response(await _ask(request, Conversations.create, body.metadata or {}, body.items))


@router.get("/v1/conversations/{conversation_id}")
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    """Show a conversation: its creation time and metadata."""
    return json_response(await _ask(request, Conversations.find, conversation_id))


@router.post("/v1/conversations/{conversation_id}", dependencies=_JSON)
async def update_conversation(conversation_id: str, body: ConversationUpdate, request: Request) -> Response:
    """Replace the metadata of a conversation."""
    return json_response(await _ask(request, Conversations.update, conversation_id, body.metadata or {}))


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, request: Request) -> Response:
    """Delete a conversation and its items."""
    await _ask(request, Conversations.delete, conversation_id)
    return json_response(Deleted(conversation_id, object="conversation.deleted"))


@router.post("/v1/conversations/{conversation_id}/items", dependencies=_JSON)
async def add_items(conversation_id: str, body: ConversationItems, request: Request) -> Response:
    """Append items to a conversation."""
    return write_page(await _ask(request, Conversations.add, conversation_id, body.items), more=False)


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(conversation_id: str, request: Request) -> Response:
    """List the items of a conversation, the newest first. Parameters: `limit`, `order`, `after`."""
    found = await _ask(request, Conversations.items, conversation_id)
    return page_of_items(request, list(map(msgspec.json.decode, found)))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Show an item of a conversation."""
    found = await _ask(request, Conversations.item, conversation_id, item_id)
    return Response(found, media_type="application/json")


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Delete an item of a conversation."""
    return json_response(await _ask(request, Conversations.delete_item, conversation_id, item_id))


async def _ask(request: Request, work: Callable[..., T], *given: Any) -> T:
    """The result of a function of the conversations that are kept, called with the client's name and more."""
    kept = request.scope["app"].state.runner.kept.conversations
    with refused_if_full(FULL_DISK):
        return await asyncio.to_thread(work, kept, state_of(request.scope).caller.key_name, *given)
