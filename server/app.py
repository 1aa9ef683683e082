"""The HTTP application: routes, the guards before them, and one shape for everything that goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from server.errors import ApiError, BadRequest, Internal
from server.frontend import Frontend
from server.http.middleware import Bounds, HttpNumbers, KeyGuard, RequestIds, error_response
from server.http.shortcut import Shortcut, find_endpoints
from server.routes import admin, chat, completions, embeddings, models, pooling, scores, tei, tokenize
from server.status import Draining

ROUTERS = [
    routes.router for routes in (admin, models, completions, chat, embeddings, pooling, scores, tei, tokenize)
]

MAX_REPORTED = 5
"""Validation errors told in one answer."""
MAX_INPUT = 200


class InvalidBody(BadRequest):
    type = "Bad Request"


def openapi_schema() -> dict[str, Any]:
    """All routes and bodies, for the reference page."""
    return _routed(docs=True).openapi()


def create_app(frontend: Frontend) -> ASGIApp:
    """Our own layers lie around FastAPI, not within: what takes the short way meets none of its layers."""
    config = frontend.config
    routed = _routed(docs=not config.disable_fastapi_docs)
    routed.state.frontend = frontend
    routed.state.config = config
    explain = _explainer(frontend)

    async def handler(request: Request, error: Exception) -> Response:
        return explain(request, error)

    for kind in (ApiError, HTTPException, RequestValidationError, Exception):
        routed.add_exception_handler(kind, handler)
    # The last is the first that is passed.
    app: ASGIApp = Bounds(Shortcut(routed, find_endpoints(ROUTERS), explain))
    if config.api_key:
        app = KeyGuard(app, config.api_key)
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
    return HttpNumbers(app, frontend.metrics)


def _routed(*, docs: bool) -> FastAPI:
    app = FastAPI(
        title="Facet",
        version=version("facet-serve"),
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        openapi_url="/openapi.json" if docs else None,
    )
    for router in ROUTERS:
        app.include_router(router)
    return app


def _explainer(frontend: Frontend) -> Callable[[Request, Exception], JSONResponse]:
    """An error of any kind, as an answer."""

    def explain(request: Request, error: Exception) -> JSONResponse:
        match error:
            case ApiError():
                told = error
            case HTTPException():
                told = _from_http(request, error)
            case RequestValidationError():
                told = invalid_body(error.errors())
            case _:
                told = Internal("Internal server error")
        # A client that keeps its connection to a server that is leaving would only meet it again.
        return error_response(told, close=isinstance(frontend.status, Draining) and told.status == 503)

    return explain


class _HttpError(ApiError):
    """Whatever Starlette refuses by itself: no such path, no such method, an unreadable body."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None) -> None:
        super().__init__(message)
        self.status = status
        self.type = _type_of(status)
        self._headers = headers or {}

    def headers(self) -> dict[str, str]:
        return dict(self._headers)


def _type_of(status: int) -> str:
    if status == 400:
        return BadRequest.type
    phrase = HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "")
    return phrase if phrase.endswith("Error") else phrase + "Error"


def _from_http(request: Request, error: HTTPException) -> ApiError:
    message = error.detail
    if error.status_code == 404:
        message = f"There is no {request.url.path} here; GET /docs lists what there is."
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}; use {allowed}."
    return _HttpError(error.status_code, message, error.headers)


def invalid_body(errors: Iterable[Mapping[str, Any]]) -> InvalidBody:
    """The peer's text for a body that does not fit, cut to what a reader can use."""
    found = list(errors)
    lines = [f"  {_shown(error)}" for error in found[:MAX_REPORTED]]
    count = f"{len(found)} validation error{'s' if len(found) != 1 else ''}:"
    param = _location(found[0]) if found else None
    return InvalidBody("\n".join([count, *lines]), param)


def _shown(error: Mapping[str, Any]) -> dict[str, object]:
    shown: dict[str, object] = {
        "type": error.get("type"),
        "loc": _location(error),
        "msg": error.get("msg"),
        "input": _shortened(error.get("input")),
    }
    if error.get("ctx"):
        shown["ctx"] = {key: _shortened(str(value)) for key, value in error["ctx"].items()}
    return shown


def _location(error: Mapping[str, Any]) -> str:
    # Which of several forms a body has (a tag in parentheses) is no place in it.
    return ".".join(str(part) for part in error.get("loc", ()) if not str(part).startswith("("))


def _shortened(value: object) -> object:
    match value:
        case dict():
            return f"<dict of {len(value)} items>"
        case list() | tuple():
            return f"<list of {len(value)} items>"
        case str() | bytes() if len(value) > MAX_INPUT:
            return str(value[:MAX_INPUT]) + "…"
        case str() | bytes() | int() | float() | None:
            return value
        case _:
            return f"<{type(value).__name__}>"
