"""GET /v1/models: the served model, under each of its names."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from server.api.models import ModelCard, ModelList, Permission
from server.http.endpoint import Endpoint
from server.http.sse import json_response
from server.model_facts import Facts
from server.routes.generation import frontend_of, require_ready

router = APIRouter(route_class=Endpoint, tags=["models"], dependencies=[Depends(require_ready)])


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """List the names that requests may use."""
    facts = frontend_of(request).facts
    return json_response(ModelList([_card(name, facts) for name in facts.model_names]))


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> Response:
    """Show one model; its name may contain slashes."""
    frontend = frontend_of(request)
    frontend.check_model(name)
    return json_response(_card(name, frontend.facts))


def _card(name: str, facts: Facts) -> ModelCard:
    return ModelCard(
        id=name,
        created=facts.created,
        root=facts.root,
        max_model_len=facts.max_model_len,
        tasks=facts.tasks,
        quantization=facts.ready.quantization,
        permission=[Permission(id=f"modelperm-{name}", created=facts.created)],
    )
