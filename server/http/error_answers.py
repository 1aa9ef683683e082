"""Errors in the shape of the API that was asked."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.access.request_state import path_of, state_of
from server.errors import ApiError, HttpError, Internal, error_body, status_at
from server.reading.endpoint_table import BY_PATH

DIALECT = b"x-facet-dialect"
"""The header that names the API whose body and answer a request has, where several share the path."""

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
    close = status.state == "draining" and status.refuses and found.status == 503
    return error_response(found, path_of(request.scope), _dialect_of(request), close=close)


def error_response(error: ApiError, path: str, dialect: str = "", *, close: bool = False) -> JSONResponse:
    """The answer to a request for `path`, in this dialect, that ended in `error`."""
    headers = {**error.headers(), **({"Connection": "close"} if close else {})}
    return JSONResponse(error_body(error, path, dialect), status_at(error, path, dialect), headers)


def _dialect_of(request: Request) -> str:
    """The dialect of a request whose path several APIs share, or an empty text."""
    row = BY_PATH.get(path_of(request.scope))
    if row is None or not row.dialects:
        return ""
    named = state_of(request.scope).header(DIALECT) or request.app.state.config.dialect
    return named if named in row.dialects else ""


def _from_http(request: Request, error: HTTPException) -> ApiError:
    message = error.detail
    option = _option_of(request)
    if option is not None and error.status_code in (404, 405):
        return HttpError(404, f"{request.url.path} is not served: {option}.")
    if error.status_code == 404:
        documented = not request.app.state.config.disable_fastapi_docs
        advice = "; GET /docs lists what there is" if documented else ""
        message = f"There is no {request.url.path} here{advice}."
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}; use {allowed}."
    return HttpError(error.status_code, message, error.headers)


def _option_of(request: Request) -> str | None:
    """Why a route is not there that this request is for; None if there never is one."""
    path = path_of(request.scope)
    for route, option in request.app.state.left_out:
        if request.method in route.methods and route.path_regex.match(path):
            return option
    return None
