"""Turns errors into HTTP answers: one JSON body in the shape of the API that was asked."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from server.errors import ApiError, HttpError, Internal, error_body
from server.http.server_status import Draining

CLIENT_GONE = 499
"""The status under which a request is counted whose client left before the answer."""


def explain(request: Request, error: Exception) -> Response:
    """The answer to a request that ended in `error`. A bug's text is not shown to clients."""
    match error:
        case ApiError():
            found = error
        case HTTPException():
            found = _from_http(request, error)
        case _:
            found = Internal("Internal server error")
    # A client that keeps its connection to a server that shuts down would only be refused again.
    status = request.app.state.frontend.status
    draining = isinstance(status, Draining) and status.refuses
    return error_response(found, path_of(request.scope), close=draining and found.status == 503)


def error_response(error: ApiError, path: str, *, close: bool = False) -> JSONResponse:
    """The answer to a request for `path` that ended in `error`."""
    headers = {**error.headers(), **({"Connection": "close"} if close else {})}
    return JSONResponse(error_body(error, path), error.status, headers)


def path_of(scope: Scope) -> str:
    """The path without the prefix that a proxy has added, as routes are written."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _from_http(request: Request, error: HTTPException) -> ApiError:
    message = error.detail
    if error.status_code == 404:
        advice = "; GET /docs lists what there is" if request.app.openapi_url else ""
        message = f"There is no {request.url.path} here{advice}."
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}; use {allowed}."
    return HttpError(error.status_code, message, error.headers)
