"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict

from server.access.request_state import state_of
from server.errors import NotFound
from server.frontend.adapter_commands import load_into, unload_from
from server.frontend.adapters import InvalidUserInput, ServedAdapters
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels
from server.http.endpoint import ENTRY, Endpoint
from server.routes.request_context import server_of

router = APIRouter(route_class=Endpoint, tags=["Adapters"], dependencies=ENTRY)


class LoadAdapterBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: str = ""
    lora_path: str = ""
    """The folder, below one of --lora-dir."""
    load_inplace: bool = False
    """Whether the name may mean another adapter already, which it replaces."""
    model: str = ""
    """The model that it is for, of several; `lora_name` may say it, too, as model:name."""


class UnloadAdapterBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: str = ""
    model: str = ""
    """The model that has it, if the server has several."""
    lora_int_id: int | None = None
    """A number that clients of vLLM may send, and that means nothing here."""


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: LoadAdapterBody, request: Request) -> PlainTextResponse:
    """Load an adapter into every engine, and answer when all have it."""
    if not body.lora_name or not body.lora_path:
        raise InvalidUserInput("Both 'lora_name' and 'lora_path' must be provided.")
    given = body.lora_name, body.lora_path
    if isinstance(models := server_of(request), ManyModels):
        asked = {"model": body.model, "caller": state_of(request.scope).caller}
        await load_into(models, *given, in_place=body.load_inplace, **asked)
    else:
        await _adapters(models, body.model).load(*given, in_place=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: UnloadAdapterBody, request: Request) -> PlainTextResponse:
    """Unload an adapter. Requests that it is answering go on."""
    if not body.lora_name:
        raise InvalidUserInput("'lora_name' needs to be provided to unload a LoRA adapter.")
    if isinstance(models := server_of(request), ManyModels):
        await unload_from(models, body.lora_name, model=body.model, caller=state_of(request.scope).caller)
    else:
        await _adapters(models, body.model).unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _adapters(frontend: Frontend, model: str) -> ServedAdapters:
    frontend.check_model(model)
    if frontend.adapters is None:
        raise NotFound("This server has no adapters: start it with --enable-lora.")
    return frontend.adapters
