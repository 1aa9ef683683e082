"""Routes for operators: health, metrics, load, version, sleep, caches, and ending requests by id."""

from __future__ import annotations

import asyncio
import re
import time
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from server.access.request_state import path_of, state_of
from server.errors import BadRequest, Unavailable
from server.frontend.asks.answers import Complete
from server.frontend.asks.parts import Terms
from server.frontend.asks.pooling import Pool
from server.frontend.frontend import Frontend
from server.http.endpoint import Endpoint, require_json
from server.http.middleware import DEEP
from server.metrics.server_metrics import CONTENT_TYPE
from server.model_facts import GENERATE
from server.options.option_parsing import flatten, options_of
from server.reading.prompts import Prompt
from server.requests.pooling import PooledText, PoolingParams, ReadTexts
from server.requests.sampling_params import SamplingParams
from server.requests.sleep_mode import check_tags, sleep_level
from server.routes.request_context import frontend_of, frontends_of, server_of
from server.schemas.body import FIRST_ERROR

router = APIRouter(route_class=Endpoint, tags=["Health and administration"])

DEEP_SECONDS = 10.0
"""Seconds in which a token is computed for a deep check."""

_READY = {"state": "ready", "status": "ok"}
"""What /health answers of a server that takes requests. llama.cpp's clients look for the second."""

STARTED = time.monotonic()


class AbortBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    request_ids: Annotated[list[str], Field(max_length=10_000), FIRST_ERROR]


@router.head("/live", include_in_schema=False)
@router.get("/live")
async def live() -> JSONResponse:
    """Answer 200 while the process runs, whatever the engine does."""
    return JSONResponse({"state": "live"})


@router.head("/ready", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/ready")
@router.get("/health")
@router.get("/ping")
@router.post("/ping")
@router.get("/health_generate")
async def health(request: Request) -> JSONResponse:
    """Answer 200 when requests are taken; otherwise 503 with the progress of loading or the reason.

    A server that was put to sleep is healthy, but not ready. With ?deep=1 or at /health_generate, which need
    a key if there are any, the model computes a token first, within 10 seconds.
    """
    status = server_of(request).status
    body: dict[str, object] = {"state": status.state, "reason": status.reason}
    match status.state:
        case "ready":
            is_deep = path_of(request.scope) == "/health_generate"
            if not is_deep and request.query_params.get(DEEP, "0") in ("0", "false"):
                return JSONResponse(_READY)
            began = time.monotonic()
            try:
                async with asyncio.timeout(DEEP_SECONDS):
                    await compute_token(request)
                return JSONResponse({**_READY, "elapsed_s": round(time.monotonic() - began, 3)})
            except TimeoutError:
                body = {"state": "slow", "reason": "too_slow", "elapsed_s": DEEP_SECONDS}
        case "loading":
            body |= {"stage": status.stage, "progress": round(status.fraction, 3)}
            body["elapsed_s"] = round(time.monotonic() - STARTED, 1)
        case "restarting":
            body["elapsed_s"] = round(time.monotonic() - status.since, 1)
        case "asleep" if path_of(request.scope) != "/ready":
            return JSONResponse(body)
        case _:
            pass
    return JSONResponse(body, 503, {"Retry-After": "2"})


async def compute_token(request: Request) -> None:
    """Have the model read a token and give one more, or a vector if it generates none."""
    frontend, state = frontend_of(request), state_of(request.scope)
    state.count()
    token, terms = [0], Terms(state, "ready")
    if GENERATE in frontend.facts.tasks:
        one = SamplingParams(max_tokens=1, temperature=0.0)
        await (await frontend.ask(Complete(terms=terms, prompts=[Prompt(token)], sampling=one))).whole()
    else:
        item = PooledText(token, PoolingParams().resolve(frontend.facts))
        await frontend.ask(Pool(terms=terms, texts=ReadTexts([item])))


@router.get("/version")
async def show_version() -> JSONResponse:
    """Return the server's version."""
    return JSONResponse({"version": version("facet-serve")})


_PASSWORD = re.compile(rb'(?<=://)[^/@\s"]*@')


def shown_options(config: msgspec.Struct) -> dict[str, Any]:
    """All options with their values but those that are secret, without passwords that stand in addresses."""
    values = flatten(config)
    known = {each.field: values[each.field] for each in options_of(type(config)) if not each.doc.is_secret}
    written = msgspec.json.encode(known, enc_hook=str)
    return msgspec.json.decode(_PASSWORD.sub(b"", written))


@router.get("/server_info")
async def server_info(request: Request) -> JSONResponse:
    """Return the values of all options but keys and the like, as `vllm_config`: an object, or with
    ?config_format=text, the default, a text."""
    form, found = request.query_params.get("config_format", "text"), shown_options(request.app.state.config)
    if form not in ("text", "json"):
        raise BadRequest(f"config_format is text or json, got {form[:32]!r}.", "config_format")
    text = ", ".join(f"{name}={value!r}" for name, value in found.items())
    return JSONResponse({"vllm_config": text if form == "text" else found})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return all metrics in the format of Prometheus."""
    return Response(server_of(request).metrics.page(), media_type=CONTENT_TYPE)


@router.get("/load")
async def load(request: Request) -> JSONResponse:
    """Return how many answers this API process is generating."""
    return JSONResponse({"server_load": server_of(request).live})


@router.post("/abort", dependencies=[Depends(require_json)])
async def abort(request: Request, body: AbortBody) -> JSONResponse:
    """Abort requests by their ids. Their answers finish with "abort".

    A key of a key file that is no administrator's can abort only its own requests."""
    caller = state_of(request.scope).caller
    others = caller.key is None or caller.key.admin
    found = await server_of(request).abort(body.request_ids, None if others else caller)
    return JSONResponse({"aborted": found})


@router.post("/sleep")
async def sleep(request: Request) -> JSONResponse:
    """Free the memory of weights and cache on all replicas, until /wake_up.

    It needs --enable-sleep-mode. New requests get 503; those that run are finished first, or ended with
    ?mode=abort. With ?level=1, the default, the checkpoint stays in the system's cache of files; with
    ?level=2 it is dropped from there.
    """
    query, frontend = request.query_params, frontend_of(request)
    level, mode = sleep_level(query.get("level", "1"), frontend.config.engine), query.get("mode", "wait")
    if mode not in ("wait", "abort"):
        raise BadRequest(f"`mode` is wait or abort, for requests that run; got {mode[:32]!r}.", "mode")
    _require_engine(frontend)
    await frontend.orders.sleep(level, abort=mode == "abort")
    return JSONResponse({"is_sleeping": frontend.orders.asleep})


@router.post("/wake_up")
async def wake_up(request: Request) -> JSONResponse:
    """Load the weights again from the checkpoint's files, and answer when requests are taken."""
    check_tags(request.query_params.getlist("tags"))
    frontend = frontend_of(request)
    _require_engine(frontend)
    if await frontend.orders.wake():
        raise Unavailable("The model cannot be loaded, and sleeps on; the log says why.", retry_after=10)
    return JSONResponse({"is_sleeping": frontend.orders.asleep})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> JSONResponse:
    """Return whether a replica of the model sleeps."""
    return JSONResponse({"is_sleeping": frontend_of(request).orders.asleep})


@router.post("/reset_prefix_cache")
@router.post("/flush_cache")
async def reset_prefix_cache(request: Request) -> JSONResponse:
    """Empty the prefix cache of all replicas."""
    for frontend in frontends_of(request):
        frontend.orders.reset_prefix_cache()
    return JSONResponse({"success": True})


@router.post("/reset_mm_cache")
async def reset_mm_cache(request: Request) -> JSONResponse:
    """Drop the cache of prepared media of this API process."""
    for frontend in frontends_of(request):
        frontend.forget_media()
    return JSONResponse({"success": True})


def _require_engine(frontend: Frontend) -> None:
    """Raises Unavailable if there is no engine that could sleep or wake."""
    if not frontend.orders.asleep:
        frontend.require_ready()
