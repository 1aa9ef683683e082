"""POST /tokenize and /detokenize: the tokenizer that also reads prompts."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.api.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from server.http.endpoint import Endpoint
from server.http.sse import json_response
from server.requests.prompt import encode, write_conversation
from server.routes.generation import ENTRY, config_of, frontend_of

router = APIRouter(route_class=Endpoint, tags=["tokenize"], dependencies=ENTRY)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokenize a text, or a conversation as the chat endpoint would write it."""
    frontend = frontend_of(request)
    frontend.check_model(body.model)
    if body.messages is None:
        text, special = body.prompt or "", True
    else:
        text, special = await write_conversation(body, body.messages, frontend, config_of(request)), False
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    ids = await encode(text, frontend, add_special_tokens=special)
    return json_response(
        Tokenized(
            count=len(ids),
            max_model_len=frontend.facts.max_model_len,
            tokens=ids,
            token_strs=[frontend.tokenizer.token_text(id) for id in ids] if body.return_token_strs else None,
        )
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens, special ones included."""
    frontend = frontend_of(request)
    frontend.check_model(body.model)
    frontend.facts.check_token_ids(body.tokens, "tokens")
    return json_response(Detokenized(frontend.tokenizer.decode(body.tokens, skip_special_tokens=False)))
