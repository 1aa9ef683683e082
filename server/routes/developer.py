"""Routes for developers and trainers, and not for strangers: methods of workers, pauses, torch's profiler."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from engine_core.client.operator_commands import WeightsTaken
from server.errors import BadRequest, HttpError, Unavailable
from server.http.endpoint import ENTRY, Endpoint, require_ready
from server.http.sse import encode
from server.routes.request_context import frontend_of
from server.schemas.body import Text
from worker.calls.messages import APPLY_MODEL, CallFailed, NoWorkers

calls = APIRouter(route_class=Endpoint, tags=["Development"])
"""Served with --server-dev-mode."""
profiler = APIRouter(route_class=Endpoint, tags=["Development"], dependencies=[Depends(require_ready)])
"""Served with --profiler-config."""


_TRUE = frozenset({"true", "1", "yes", "on"})


class CallBody(BaseModel):
    """A method of the class of --worker-extension-cls, and its arguments."""

    model_config = ConfigDict(extra="forbid")

    method: Text
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, Field(gt=0)] | None = None


class WeightsBody(BaseModel):
    """The folder of other weights. The names of the fields but the first are SGLang's."""

    path: str | None = None
    model_path: str | None = None
    abort_all_requests: bool = False


@calls.post("/collective_rpc", dependencies=ENTRY)
async def collective_rpc(request: Request, body: CallBody) -> Response:
    """Run a method in every worker, between two steps, and return what each has returned."""
    if body.method == APPLY_MODEL:
        raise BadRequest("`apply_model` is for programs. Name a method of --worker-extension-cls.", "method")
    return await _call(request, body.method, body.args, body.kwargs, body.timeout)


@calls.post("/pause", dependencies=[Depends(require_ready)])
async def pause(request: Request) -> JSONResponse:
    """Have all replicas compute nothing until /resume; answers when they do.

    Requests that run are ended with ?mode=abort, the default, finished with wait, and stand still with keep.
    Those that come meanwhile wait. Prefixes are forgotten unless ?clear_cache=false, or requests stand still.
    """
    query, orders = request.query_params, frontend_of(request).orders
    waits = query.get("wait_for_inflight_requests", "false").lower() in _TRUE
    mode = query.get("mode", "wait" if waits else "abort")
    if mode not in ("abort", "wait", "keep"):
        raise BadRequest(f"`mode` is abort, wait or keep, for requests that run; got {mode[:32]!r}.", "mode")
    await orders.pause(mode, clear_cache=query.get("clear_cache", "true").lower() in _TRUE)
    return JSONResponse({"status": "paused" if orders.paused else "resumed"})


@calls.post("/resume")
async def resume(request: Request) -> JSONResponse:
    """Have all replicas go on with the requests that stand still or wait."""
    await frontend_of(request).orders.resume()
    return JSONResponse({"status": "resumed"})


@calls.get("/is_paused")
async def is_paused(request: Request) -> JSONResponse:
    """Tell whether replicas compute nothing until /resume."""
    return JSONResponse({"is_paused": frontend_of(request).orders.paused})


@calls.post("/update_weights", dependencies=ENTRY)
@calls.post("/update_weights_from_disk", dependencies=ENTRY)
async def update_weights(request: Request, body: WeightsBody) -> JSONResponse:
    """Have all replicas compute with the weights of a folder: the same architecture, names and shapes.

    All compare names and shapes first, and nothing is changed if one refuses. Requests that run go on from
    the tokens that they have; prefixes are forgotten.
    """
    if (folder := body.path or body.model_path) is None:
        raise BadRequest("`path` is the folder of a checkpoint, which engines read: name one.", "path")
    frontend, began = frontend_of(request), time.monotonic()
    try:
        await frontend.orders.update_weights(folder, abort=body.abort_all_requests)
    except WeightsTaken as error:
        message = f"The weights are not replaced: {error}. Order them again when it is done."
        raise HttpError(409, message) from None
    except NoWorkers as error:
        raise Unavailable(f"The weights are not replaced: {error}.", retry_after=1) from None
    except ValueError as error:
        raise BadRequest(f"The weights are not replaced: {error}", "path") from None
    seconds = round(time.monotonic() - began, 3)
    message = f"The weights are those of {folder}."
    return JSONResponse({"success": True, "message": message, "path": folder, "elapsed_s": seconds})


@profiler.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Begin to record what workers do. `profile_prefix` begins the names of the files."""
    asked = request.query_params
    if unknown := [name for name in asked if name != "profile_prefix"]:
        raise BadRequest(f"`{unknown[0][:64]}` is not supported: a recording ends with POST /stop_profile.")
    return await _call(request, "profile", [True, asked.get("profile_prefix")])


@profiler.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End the recording, and return the path of each worker's file once it is written."""
    return await _call(request, "profile", [False])


async def _call(
    request: Request,
    method: str,
    args: list[Any],
    kwargs: dict[str, Any] | None = None,
    seconds: float | None = None,
) -> Response:
    try:
        async with asyncio.timeout(seconds):
            results = await frontend_of(request).call_workers(method, args, kwargs or {})
    except NoWorkers as error:
        raise Unavailable(f"{method} failed: {error}", retry_after=1) from None
    except CallFailed as error:
        raise BadRequest(f"{method} failed: {error}") from None
    except TimeoutError:
        raise HttpError(504, f"{method} takes longer than {seconds:g} seconds, and goes on.") from None
    return Response(encode({"results": results}), media_type="application/json")
