"""GET /v1/models: the served model, under each of its names. /tokenize, /tokenizer_info: its tokenizer."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from server.api.tokenize import DetokenizeRequest, TokenizeRequest
from server.errors import Forbidden
from server.frontend.frontend import Frontend
from server.http.endpoint import Endpoint
from server.http.sse import json_response
from server.reading.body_table import DETOKENIZE, TOKENIZE
from server.routes.request_context import ENTRY, config_of, frontend_of, read_texts, require_ready
from server.text.tokenizer_files import tokenizer_info

router = APIRouter(route_class=Endpoint, tags=["models"], dependencies=[Depends(require_ready)])
tokenizer = APIRouter(route_class=Endpoint, tags=["tokenize"], dependencies=ENTRY)


_ALLOWED = {
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
"""A permission as clients of the OpenAI API expect it: everything but training is allowed."""


class CardMedia(msgspec.Struct):
    """What a model takes beside text."""

    most: dict[str, int]
    """The most items of each kind in a prompt; kinds that the model does not take are missing."""
    max_bytes: int
    """The most bytes of all files of a request, counted as base64 where they are in its body."""


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "facet"
    root: str
    parent: str | None = None
    max_model_len: int
    tasks: tuple[str, ...]
    """The tasks that requests may ask for. Clients of OpenAI ignore this field."""
    quantization: str | None = None
    """The form of the weights, if they are quantized. Clients of OpenAI ignore this field."""
    media: CardMedia | None
    """None if the model takes only texts. Clients of OpenAI ignore this field."""
    permission: list[dict[str, object]]


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """List the names that requests may use."""
    frontend = frontend_of(request)
    return json_response(ModelList([_card(name, frontend) for name in frontend.facts.model_names]))


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> Response:
    """Show one model; its name may contain slashes."""
    frontend = frontend_of(request)
    frontend.check_model(name)
    return json_response(_card(name, frontend))


def _card(name: str, frontend: Frontend) -> ModelCard:
    facts, media = frontend.facts, frontend.media
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": facts.created,
        **_ALLOWED,
    }
    return ModelCard(
        id=name,
        created=facts.created,
        root=facts.root,
        max_model_len=facts.max_model_len,
        tasks=facts.tasks,
        quantization=facts.ready.quantization,
        media=None if media is None else CardMedia(media.facts.most, media.most_bytes),
        permission=[permission],
    )


@tokenizer.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokenize a text, or a conversation as the chat endpoint would write it."""
    frontend_of(request).check_model(body.model)
    return Response(await read_texts(request, body, TOKENIZE), media_type="application/json")


@tokenizer.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens, special ones included."""
    frontend_of(request).check_model(body.model)
    return Response(await read_texts(request, body, DETOKENIZE), media_type="application/json")


@router.get("/tokenizer_info")
async def show_tokenizer_info(request: Request) -> Response:
    """Return what the tokenizer's files say, with --enable-tokenizer-info-endpoint."""
    frontend = frontend_of(request)
    if not config_of(request).enable_tokenizer_info_endpoint:
        raise Forbidden("This server was started without --enable-tokenizer-info-endpoint.")
    return JSONResponse(tokenizer_info(frontend.tokenizer, frontend.folder))
