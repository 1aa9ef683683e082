"""The HTTP application: FastAPI with our routes, and the middleware that every request passes before them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from server.access.keyring import Access, HeadCheck, head_check
from server.frontend.frontend import Frontend
from server.http.allowed_hosts import HostRules
from server.http.authentication import KeyCheck
from server.http.documented_answers import DocumentedApp
from server.http.endpoint import Endpoint, PathTable
from server.http.error_answers import explain
from server.http.middleware import HeaderChecks, HttpMetrics, RequestIds, TimingHeaders
from server.http.traces import Traces, make_tracer
from server.options.server_config import ServerConfig
from server.page import api_page
from server.page import routes as page
from server.routes import admin, chat, completions, models, pooling, scores, tei, tokenize
from server.routes.conversations import messages, responses
from server.routes.request_context import require_room

_ROUTES = (admin, models, completions, chat, responses, messages, pooling, scores, tei, tokenize)
ROUTERS = [*(routes.router for routes in _ROUTES), page.events]


def openapi_schema() -> dict[str, Any]:
    """The OpenAPI description of all routes and bodies, for docs/api.md."""
    return _make_app(ROUTERS, docs=True).openapi()


def create_app(frontend: Frontend) -> FastAPI:
    routers = ROUTERS if frontend.config.disable_page else [*ROUTERS, page.router]
    app = _make_app(routers, docs=not frontend.config.disable_fastapi_docs)
    app.state.frontend = frontend
    app.state.config = frontend.config

    async def handler(request: Request, error: Exception) -> Response:
        return explain(request, error)

    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, handler)
    app.add_middleware(PathTable, routers=routers)
    _add_middleware(app, frontend.config, frontend.access)
    app.add_middleware(HttpMetrics, metrics=frontend.metrics)
    return app


def early_admission(frontend: Frontend) -> HeadCheck:
    """What decides on requests for the engine before the application sees them."""
    paths = [
        route.path
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, Endpoint) and require_room in route.checks
    ]
    return head_check(frontend.admissions, paths, frontend.access)


def _make_app(routers: Sequence[APIRouter], *, docs: bool) -> FastAPI:
    app = DocumentedApp(
        title="Facet",
        version=version("facet-serve"),
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json" if docs else None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # spares a look for OpenTelemetry
    )
    for router in routers:
        app.include_router(router)
    if docs:
        app.include_router(api_page.router)
    return app


def _add_middleware(app: FastAPI, config: ServerConfig, access: Access) -> None:
    """Adds the middleware. What is added later is passed earlier."""
    address = config.host if config.uds is None else None
    hosts = HostRules(address, allowed_hosts=config.allowed_hosts, allowed_origins=config.allowed_origins)
    app.add_middleware(HeaderChecks, hosts=hosts)
    if access.is_guarded:
        app.add_middleware(KeyCheck, access=access)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    if config.enable_request_id_headers:
        app.add_middleware(RequestIds)
    if config.reports.enable_timing_headers:
        app.add_middleware(TimingHeaders)
    if config.reports.otlp_traces_endpoint is not None:
        app.add_middleware(Traces, tracer=make_tracer(config.reports.otlp_traces_endpoint))
