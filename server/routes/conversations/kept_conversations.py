"""/v1/conversations: lists of items that are kept, which responses continue and add to."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from server.batches.bodies import ConversationItems, ConversationRequest, ConversationUpdate, Deleted
from server.batches.conversations import Conversations
from server.http.endpoint import Endpoint, require_json
from server.http.sse import json_response
from server.routes.batches import read_page
from server.routes.conversations.kept_responses import ask_kept, kept_of

router = APIRouter(route_class=Endpoint, tags=["Chat"])

_JSON = [Depends(require_json)]


def _kept(request: Request) -> Conversations:
    return kept_of(request).conversations


@router.post("/v1/conversations", dependencies=_JSON)
async def create_conversation(body: ConversationRequest, request: Request) -> Response:
    """Create a conversation, which `conversation` in /v1/responses continues."""
    return json_response(await ask_kept(request, _kept(request).create, body.metadata or {}, body.items))


@router.get("/v1/conversations/{conversation_id}")
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    """Show a conversation: its creation time and metadata."""
    return json_response(await ask_kept(request, _kept(request).find, conversation_id))


@router.post("/v1/conversations/{conversation_id}", dependencies=_JSON)
async def update_conversation(conversation_id: str, body: ConversationUpdate, request: Request) -> Response:
    """Replace the metadata of a conversation."""
    return json_response(await ask_kept(request, _kept(request).update, conversation_id, body.metadata or {}))


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, request: Request) -> Response:
    """Delete a conversation and its items."""
    await ask_kept(request, _kept(request).delete, conversation_id)
    return json_response(Deleted(conversation_id, object="conversation.deleted"))


@router.post("/v1/conversations/{conversation_id}/items", dependencies=_JSON)
async def add_items(conversation_id: str, body: ConversationItems, request: Request) -> Response:
    """Append items to a conversation."""
    return json_response(await ask_kept(request, _kept(request).add, conversation_id, body.items))


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(conversation_id: str, request: Request) -> Response:
    """List the items of a conversation, the newest first. Parameters: `limit`, `order`, `after`."""
    asked = read_page(request, 20, 100)
    return json_response(await ask_kept(request, _kept(request).page, conversation_id, asked))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Show an item of a conversation."""
    found = await ask_kept(request, _kept(request).item, conversation_id, item_id)
    return Response(found, media_type="application/json")


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Delete an item of a conversation."""
    return json_response(await ask_kept(request, _kept(request).delete_item, conversation_id, item_id))
