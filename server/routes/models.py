"""GET /v1/models: what is served, under each name; several are loaded and unloaded by /models/load and
/models/unload. /tokenize, /tokenizer_info: a model's tokenizer."""

from __future__ import annotations

import time
from typing import Annotated, cast

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from engine_core.adapters.messages import AdapterState
from server.access.request_state import state_of
from server.errors import Forbidden, NotFound, Unavailable
from server.frontend.adapters import ServedAdapters
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels, Named
from server.frontend.model_engines import ModelState
from server.http.endpoint import Endpoint, require_json, require_ready
from server.http.sse import json_response
from server.routes.answering import read_texts
from server.routes.request_context import config_of, frontend_of, server_of
from server.schemas.body import Body
from server.schemas.chat import ChatRequest
from server.schemas.tei import DecodeRequest, TeiTokenize
from server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from server.schemas.vendor_bodies.llama_cpp import LlamaTokenize
from server.text.tokenizer_files import tokenizer_info

router = APIRouter(route_class=Endpoint, tags=["Models"], dependencies=[Depends(require_ready)])
tokenizer = APIRouter(route_class=Endpoint, tags=["Tokens"])


_STARTED = int(time.time())
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
    """The media that a model takes beside text."""

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
    max_model_len: int | None
    """None if nothing is known of it yet, because it was never loaded."""
    tasks: tuple[str, ...]
    """The tasks that requests may ask for. Clients of OpenAI ignore this field."""
    state: str | UnsetType = UNSET
    """Only with several models: loaded, loading, unloading or unloaded. It is loaded when it is asked for."""
    model: str | UnsetType = UNSET
    """Only with several models: its own name, of which this one may be an alias."""
    memory: int | UnsetType | None = UNSET
    """Only with several models: the bytes that it takes, or took; None if that is not known."""
    quantization: str | None = None
    """The form of the weights, if they are quantized. Clients of OpenAI ignore this field."""
    media: CardMedia | None
    """None if the model takes only texts. Clients of OpenAI ignore this field."""
    decides_by: str | None = None
    """How it answers typed questions (docs/decisions_api.md); None if it does not."""
    permission: list[dict[str, object]]


class ModelName(msgspec.Struct):
    """A model in TypeSafe's list."""

    name: str
    description: str
    release_date: str = ""
    """The date is not known of checkpoints."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
    models: list[ModelName] = []
    """The same for TypeSafe's clients."""

    def __post_init__(self) -> None:
        self.models = [ModelName(card.id, f"{card.root}: {', '.join(card.tasks)}") for card in self.data]


@router.get("/v1/models")
@router.get("/models")
@router.get("/v1/models/", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """List the served models."""
    server = server_of(request)
    if isinstance(server, ManyModels):
        named = server.named(state_of(request.scope).caller)
        cards = [_card_of_several(name, state) for name, state in named]
        for state in dict.fromkeys(state for _, state in named):
            cards += [_adapter_of_several(name, Named(state, own)) for name, own in _adapter_names(state)]
        return json_response(ModelList(cards))
    cards = [_card(name, server) for name in server.facts.model_names]
    if server.adapters is not None:
        cards += [_card_of_adapter(server.adapters, state) for state in server.adapters.states]
    return json_response(ModelList(cards))


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> Response:
    """Show one model; its name may contain slashes."""
    server = server_of(request)
    if isinstance(server, ManyModels):
        named = server.find_named(name, state_of(request.scope).caller)
        if named.adapter:
            return json_response(_adapter_of_several(name, named))
        return json_response(_card_of_several(name, named.state))
    if server.adapters is not None and (state := server.adapters.find(name)) is not None:
        return json_response(_card_of_adapter(server.adapters, state))
    server.check_model(name)
    return json_response(_card(name, server))


class LoadBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=200)]
    alias: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class UnloadBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=200)]


loading = APIRouter(route_class=Endpoint, tags=["Models"], dependencies=[Depends(require_json)])


@loading.post("/models/load")
async def load_model(body: LoadBody, request: Request) -> JSONResponse:
    """Load one of several models, and answer when requests are taken. An `alias` means it from then on; those
    requests that have come by that name before go on where they are."""
    models = cast("ManyModels", server_of(request))
    state = models.find(body.model)
    async with models.using(state, retry=True):
        if body.alias is not None:
            models.move(body.alias, state)
    return JSONResponse(_described(state))


@loading.post("/models/unload")
async def unload_model(body: UnloadBody, request: Request) -> JSONResponse:
    """Unload one of several models, if no request is using it. It is loaded again when it
    is asked for."""
    models = cast("ManyModels", server_of(request))
    state = models.find(body.model)
    if not await models.unload(state):
        raise Unavailable(f"`{state.entry.name}` is in use: try again later.", retry_after=1)
    return JSONResponse(_described(state))


def _described(state: ModelState) -> dict[str, object]:
    return {"model": state.entry.name, "state": state.slot.state, "memory": state.slot.size}


def _card(name: str, frontend: Frontend) -> ModelCard:
    facts, media = frontend.facts, frontend.media
    return ModelCard(
        id=name,
        created=facts.created,
        root=facts.root,
        max_model_len=facts.max_model_len,
        tasks=facts.tasks,
        quantization=facts.ready.quantization,
        media=None if media is None else CardMedia(media.facts.most, media.most_bytes),
        decides_by=facts.decides_by,
        permission=[_permission(name, facts.created)],
    )


def _card_of_adapter(adapters: ServedAdapters, state: AdapterState) -> ModelCard:
    base = adapters.frontend.facts.model_names[0]
    card = _card(state.adapter.name, adapters.adapted(state))
    return msgspec.structs.replace(card, parent=base, root=state.adapter.root)


def _card_of_several(name: str, state: ModelState) -> ModelCard:
    """The card of a model that may not be loaded."""
    facts, slot, taken = state.facts, state.slot, state.media
    created = _STARTED if facts is None else facts.created
    return ModelCard(
        id=name,
        created=created,
        root=state.entry.config.root,
        max_model_len=state.max_len,
        tasks=state.tasks,
        state=slot.state,
        model=state.entry.name,
        memory=slot.size or None,
        quantization=None if facts is None else facts.ready.quantization,
        media=None if taken is None else CardMedia(*taken),
        decides_by=None if facts is None else facts.decides_by,
        permission=[_permission(name, created)],
    )


def _adapter_names(state: ModelState) -> list[tuple[str, str]]:
    """The names by which requests reach the adapters of one of several models, and their own names."""
    served, given = state.slot.served, state.adapters
    loaded = [] if served is None or served.adapters is None else served.adapters.states
    others = [each.adapter.name for each in loaded if each.adapter.name not in given]
    return [(name, name) for name in given] + [(f"{state.entry.name}:{name}", name) for name in others]


def _adapter_of_several(name: str, named: Named) -> ModelCard:
    state, own = named
    served = state.slot.served
    adapters: ServedAdapters | None = None if served is None else served.adapters
    found = None if adapters is None else adapters.find(own)
    if found is None and own not in state.adapters:
        raise NotFound(f"The model `{name[:200]}` is not loaded.", "model")
    of_model = _card_of_several(name, state)
    card = of_model if adapters is None or found is None else _card_of_adapter(adapters, found)
    several = {"id": name, "state": of_model.state, "model": of_model.model}
    several |= {"memory": None, "parent": state.entry.name, "root": card.root if found else own}
    return msgspec.structs.replace(card, **several)


def _permission(name: str, created: int) -> dict[str, object]:
    return {"id": f"modelperm-{name}", "object": "model_permission", "created": created, **_ALLOWED}


@tokenizer.post("/tokenize")
async def tokenize(body: TokenizeRequest | TeiTokenize | LlamaTokenize, request: Request) -> Response:
    """Tokenize a text, or a conversation as the chat endpoint would write it; or in the form that
    X-Facet-Dialect names, tei or llama.cpp."""
    return await _read(request, body, None if isinstance(body, TeiTokenize) else body.model)


@tokenizer.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens, special ones included."""
    return await _read(request, body, body.model)


@tokenizer.post("/decode")
async def decode(body: DecodeRequest, request: Request) -> Response:
    """Return the text of each list of tokens, as text-embeddings-inference does."""
    return await _read(request, body, None)


@tokenizer.post("/apply-template")
async def apply_template(body: ChatRequest, request: Request) -> Response:
    """Return the text that the chat template makes of a conversation, as llama.cpp does."""
    return await _read(request, body, body.model)


async def _read(request: Request, body: Body, model: str | None) -> Response:
    frontend_of(request).check_model(model)
    return Response(await read_texts(request, body), media_type="application/json")


@router.get("/tokenizer_info")
async def show_tokenizer_info(request: Request) -> Response:
    """Return what the tokenizer's files say, with --enable-tokenizer-info-endpoint."""
    frontend = frontend_of(request)
    if not config_of(request).enable_tokenizer_info_endpoint:
        raise Forbidden("This server was started without --enable-tokenizer-info-endpoint.")
    return JSONResponse(tokenizer_info(frontend.tokenizer, frontend.folder))
