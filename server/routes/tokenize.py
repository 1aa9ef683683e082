"""POST /tokenize and /detokenize: the tokenizer that also reads prompts."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.api.tokenize import DetokenizeRequest, TokenizeRequest
from server.http.endpoint import Endpoint
from server.reading.body_table import DETOKENIZE, TOKENIZE
from server.routes.request_context import ENTRY, frontend_of, read_texts

router = APIRouter(route_class=Endpoint, tags=["tokenize"], dependencies=ENTRY)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokenize a text, or a conversation as the chat endpoint would write it."""
    frontend_of(request).check_model(body.model)
    return Response(await read_texts(request, body, TOKENIZE), media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens, special ones included."""
    frontend_of(request).check_model(body.model)
    return Response(await read_texts(request, body, DETOKENIZE), media_type="application/json")
