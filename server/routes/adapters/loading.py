"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict

from server.access.client_identity import Caller
from server.access.request_state import state_of
from server.errors import BadRequest, NotFound
from server.frontend.adapters import InvalidUserInput, ServedAdapters
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels, Named
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


async def load_into(
    models: ManyModels, name: str, path: str, *, model: str, in_place: bool, caller: Caller | None
) -> None:
    """Load an adapter beside one of several models, which is loaded first, and again whenever that is.

    Raises ApiError if it cannot be.
    """
    state, own = _meant(models, name, model, caller)
    async with models.using(state, retry=True) as frontend:
        await frontend.adapters.load(own, path, in_place=in_place)
        state.ordered[own] = path


async def unload_from(models: ManyModels, name: str, *, model: str, caller: Caller | None) -> None:
    """Unload an adapter that was ordered, or found by its name. Raises ApiError if there is none."""
    state, own = _meant(models, name, model, caller)
    ordered, served = state.ordered.pop(own, None), state.slot.served
    if served is not None and (ordered is None or served.adapters.find(own) is not None):
        await served.adapters.unload(own)
    elif ordered is None:
        raise NotFound(f"The lora adapter '{name}' cannot be found.", "lora_name")


def _meant(models: ManyModels, name: str, model: str, caller: Caller | None) -> Named:
    """The model that an order means, and the adapter's name without the model's. Raises ApiError."""
    named = dict(models.named(caller))
    takers = {state.entry.name: state for state in named.values() if state.entry.takes_orders}
    base, colon, own = name.rpartition(":")
    if not takers:
        raise NotFound("No model takes adapters here: give some enable-lora and allow-runtime-lora.")
    if not (colon and base in named):
        base, own = model, name
    owners = [state for state in takers.values() if own in state.adapters]
    found = [models.find(each, caller) for each in (base, model) if each] or owners or list(takers.values())
    state = found[0]
    if any(one is not state for one in found):
        raise BadRequest(f"Say by `model` which one is to have `{own}`: {' or '.join(takers)}.", "model")
    if state.entry.name not in takers:
        raise BadRequest(
            f"`{state.entry.name}` takes no orders: give its table enable-lora and allow-runtime-lora.",
            "model",
        )
    if own in state.entry.adapters:
        raise BadRequest(
            f"`{own}` stands in the table of `{state.entry.name}`: change it there.", "lora_name"
        )
    others = [one.entry.name for one in models.states if one is not state and own in one.adapters]
    if own in dict(models.named()) or others:
        whose = f"an adapter of `{others[0]}`" if others else "a model"
        raise BadRequest(f"`{own}` is the name of {whose}: choose another one.", "lora_name")
    return Named(state, own)
