"""The HTTP application: FastAPI with our routes, and the middleware that every request passes before them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from models.plugins import load_plugin
from server.access.keyring import Access, HeadCheck, head_check
from server.batches.app_call import OwnerCalls
from server.batches.folder import Folder
from server.batches.responses import KeptResponses
from server.batches.runner import Runner
from server.errors import OLLAMA, Api, ApiError, api_of
from server.frontend.adapters import ServedAdapters
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels
from server.http.connection.hosts_and_proxies import HeaderChecks, HostRules
from server.http.endpoint import Endpoint, PathTable
from server.http.error_answers import CLIENT_GONE, explain
from server.http.middleware import (
    HttpMetrics,
    KeyCheck,
    RequestIds,
    TimingHeaders,
    Traces,
)
from server.options.server_flags import ServerConfig
from server.page import api_page
from server.page import routes as page
from server.reading.endpoint_table import BY_PATH, TABLE
from server.requests.labels.moderation import read_table
from server.routes import (
    admin,
    batches,
    chat,
    completions,
    decisions,
    developer,
    models,
    pooling,
    tei,
)
from server.routes.adapters import loading
from server.routes.adapters.adapter_choice import AdapterChoice
from server.routes.audio import transcriptions
from server.routes.conversations import (
    cohere_chat,
    kept_conversations,
    kept_responses,
    message_batches,
    messages,
    responses,
)
from server.routes.labels import entities, moderations
from server.routes.model_choice import ModelChoice
from server.routes.ollama import generating as ollama_generating
from server.routes.ollama import models as ollama_models
from server.routes.ollama import pooling as ollama_pooling
from server.routes.peers import llama_cpp, sagemaker, sglang

LINES_OF_MANY_MODELS = 64
"""Lines of batches that may be under way at a time where several models are served."""


def _object(required: str, **fields: Any) -> dict[str, Any]:
    """The schema of an object with these fields, of which those named first are always there."""
    return {"type": "object", "required": required.split(), "properties": fields}


_TEXT = {"type": "string"}
_CODE = {"type": ["integer", "string", "null"]}
_KIND = _object("type message", type=_TEXT, message=_TEXT)
_SCHEMAS: dict[Api, dict[str, Any]] = {
    "openai": _object(
        "error",
        error=_object(
            "message type", message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code=_CODE
        ),
    ),
    "anthropic": _object("type error", type={"const": "error"}, error=_KIND),
    "ollama": _object("error", error=_TEXT),
    "system_one": _object("detail", detail={"type": ["array", "object"]}),
    "cohere": _object("message", message=_TEXT),
    "tei": _object("error error_type", error=_TEXT, error_type=_TEXT),
    "llama.cpp": _object("error", error=_object("code message type", code=_CODE, message=_TEXT, type=_TEXT)),
}
_ERRORS = {
    "4XX": "The request is wrong, not allowed, too large, or more than the client's share.",
    "5XX": "The request cannot be answered now, or has failed; Retry-After says when to try again.",
}


class Application(FastAPI):
    """FastAPI with a description of errors, and with our middleware before it instead of in its own stack.

    A request for a plain path is answered before any of FastAPI's middleware, which would do nothing for it.
    """

    entry: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.entry(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        known = self.openapi_schema is not None
        schema = super().openapi()
        if not known:
            for path, methods in schema["paths"].items():
                for operation in methods.values():
                    _document(operation, path)
                    api_page.summarize(operation)
        return schema


def _error_schema(path: str) -> dict[str, Any]:
    """The schema of errors of a path, as `server.errors.error_body` writes them."""
    return _SCHEMAS[api_of(path)]


def _document(operation: dict[str, Any], path: str) -> None:
    answers = operation["responses"]
    answers.pop("422", None)  # errors of bodies are 400 here
    error = _error_schema(path)
    for status, description in _ERRORS.items():
        answers[status] = {"description": description, "content": {"application/json": {"schema": error}}}
    if (row := BY_PATH.get(path)) is not None and row.streams:
        stream = ollama_generating.NDJSON if path.startswith(OLLAMA) else "text/event-stream"
        answers["200"]["content"][stream] = {}


_ROUTES = (
    admin,
    models,
    completions,
    chat,
    responses,
    kept_responses,
    kept_conversations,
    messages,
    message_batches,
    cohere_chat,
    decisions,
    pooling,
    entities,
    moderations,
    transcriptions,
    batches,
)
ROUTERS = [
    *(routes.router for routes in _ROUTES),
    *(
        pooling.scores,
        tei.router,
        models.tokenizer,
        *(each.router for each in (sagemaker, llama_cpp, sglang)),
        page.events,
    ),
]
OLLAMA_ROUTERS = [each.router for each in (ollama_generating, ollama_pooling, ollama_models)]


def openapi_schema() -> dict[str, Any]:
    """The OpenAPI description of all routes and bodies, for docs/api.md."""
    return _make_app([*ROUTERS, models.loading, loading.router, *OLLAMA_ROUTERS]).openapi()


def create_app(frontend: Frontend | ManyModels, work_folder: Path | None = None) -> FastAPI:
    """The application. `work_folder` is for files and batches, if the configuration names no folder."""
    config, several = frontend.config, isinstance(frontend, ManyModels)
    asked = _optional_routers(config, several=several)
    routers = [*ROUTERS, *(router for router, there, _ in asked if there)]
    app = _make_app(routers)
    app.state.left_out = [
        (route, option)
        for router, there, option in asked
        for route in router.routes
        if not there and isinstance(route, Endpoint)
    ]
    app.state.paths = [getattr(route, "path", "") for router in routers for route in router.routes]
    app.state.frontend = frontend
    app.state.config = config
    app.state.description = api_page.ApiDescription()
    table = config.moderation_categories
    app.state.moderation = None if table is None else read_table(Path(table))
    app.state.runner = _make_runner(app, frontend, work_folder)

    async def handler(request: Request, error: Exception) -> Response:
        return explain(request, error)

    async def count_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(ClientDisconnect, count_gone)
    entry: ASGIApp = PathTable(super(Application, app).__call__, routers)
    if isinstance(frontend, ManyModels):
        entry = ModelChoice(entry, models=frontend)
    else:
        if config.engine.worker.lora.enable_lora:
            frontend.adapters = ServedAdapters(frontend)
        entry = AdapterChoice(entry, frontend=frontend)
    entry = _behind_middleware(
        entry, config, frontend.access, () if isinstance(frontend, ManyModels) else config.model_names
    )
    for name in config.plugins.middleware:
        entry = _plugged(entry, name)
    endpoint = config.reports.otlp_traces_endpoint
    traces = None if endpoint is None else Traces(endpoint)
    app.entry = HttpMetrics(entry, frontend.metrics, traces)
    return app


def _make_runner(app: FastAPI, frontend: Frontend | ManyModels, work_folder: Path | None) -> Runner:
    """What does the work that waits, in the folder that is named, or in that of this run."""
    options = frontend.config.batches
    place = Path(options.batch_dir) if options.batch_dir is not None else work_folder
    # Without either it is one that cannot be made.
    folder = Folder(place or Path(os.devnull), options.most_bytes, ends_with_server=options.batch_dir is None)
    calls = OwnerCalls(app, frontend.access)
    kept = KeptResponses(folder, options.response_store)
    return Runner(folder, calls, lambda: _most_lines(frontend), kept)


def _most_lines(frontend: Frontend | ManyModels) -> int:
    """How many lines of batches may be under way at a time."""
    if isinstance(frontend, ManyModels):
        return LINES_OF_MANY_MODELS
    # A quarter more than run at once, so that a step is never short of them; others keep half of the places.
    admissions = frontend.admissions
    return max(1, min(admissions.slots * 5 // 4 + 1, admissions.most // 2))


def _optional_routers(config: ServerConfig, *, several: bool) -> list[tuple[APIRouter, bool, str]]:
    """Routes that an option brings or takes away, whether they are there, and a clause on why if not."""
    return [
        (models.loading, several, "start the server with several models"),
        *((router, config.ollama, "--no-ollama has turned it off") for router in OLLAMA_ROUTERS),
        (
            loading.router,
            several or (config.adapters.allow_runtime_lora and config.engine.worker.lora.enable_lora),
            "start the server with --enable-lora and --allow-runtime-lora",
        ),
        (page.router, not config.disable_page, "--disable-page has turned it off"),
        (api_page.router, not config.disable_fastapi_docs, "--disable-fastapi-docs has turned it off"),
        (developer.calls, config.server_dev_mode, "start the server with --server-dev-mode"),
        (
            developer.profiler,
            bool(config.engine.worker.profiler_config),
            "start the server with --profiler-config",
        ),
    ]


def _plugged(app: ASGIApp, name: str) -> ASGIApp:
    """Returns the application behind middleware of the operator's own, a class or a function.

    Raises ValueError if it cannot be used.
    """
    found = load_plugin("--middleware", name)
    if isinstance(found, type):
        return found(app)
    if iscoroutinefunction(found):
        return BaseHTTPMiddleware(app, dispatch=found)
    raise ValueError(f"--middleware {name}: it is neither a class nor an async function")


def early_admission(frontend: Frontend | ManyModels) -> HeadCheck:
    """What decides on requests for the engine before the application sees them; of several models none does,
    because it is their bodies that say for which they are."""
    if isinstance(frontend, ManyModels):
        return lambda method, target, scope: None
    paths = [path for row in TABLE if row.use is not None for path in row.paths]
    return head_check(frontend.admissions, paths, frontend.access)


def _make_app(routers: Sequence[APIRouter]) -> Application:
    app = Application(
        title="Facet",
        openapi_tags=[{"name": name, "description": text} for name, text in api_page.GROUPS.items()],
        version=version("facet-serve"),
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # FastAPI's own route makes the description in the event loop
        telemetry={"tracing": False, "metrics": False, "logs": False},  # spares a look for OpenTelemetry
    )
    for router in routers:
        app.include_router(router)
    return app


def _behind_middleware(app: ASGIApp, config: ServerConfig, access: Access, names: Sequence[str]) -> ASGIApp:
    """Returns the application behind the middleware. What is put around it later is passed earlier. `names`
    are those of the only model."""
    address = config.host if config.uds is None else None
    hosts = HostRules(address, allowed_hosts=config.allowed_hosts, allowed_origins=config.allowed_origins)
    app = HeaderChecks(app, hosts=hosts)
    if access.is_guarded:
        app = KeyCheck(app, access=access, names=names)
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    if config.enable_request_id_headers:
        app = RequestIds(app)
    if config.reports.enable_timing_headers:
        app = TimingHeaders(app)
    return app
