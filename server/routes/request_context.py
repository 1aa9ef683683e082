"""What endpoints have of a request: the frontend, checks before its body, its texts, its client's leaving."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import wraps
from typing import Any, TypeVar

import msgspec
from fastapi import Depends, Request, Response

from server.access.admission import Admission
from server.access.client_identity import begin_request, caller_of, require_right
from server.api.fields import Body
from server.api.json_body import LONG
from server.errors import BadRequest
from server.frontend.frontend import Frontend
from server.http.endpoint import READ
from server.http.error_answers import CLIENT_GONE
from server.http.sse import ClientGone, json_response, while_connected
from server.options.server_config import ServerConfig
from server.reading.body_table import Reading
from server.task_names import GENERATE, require_task

R = TypeVar("R")


class NotJson(BadRequest):
    type = "Bad Request"


def frontend_of(request: Request) -> Frontend:
    return request.scope["app"].state.frontend


def config_of(request: Request) -> ServerConfig:
    return request.scope["app"].state.config


def header_of(request: Request, name: bytes) -> str | None:
    """The first header of a name in small letters: in one pass, which is quicker than Starlette's look-up."""
    for key, value in request.scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


async def require_ready(request: Request) -> None:
    """Refuses every request with 503 while the model loads, whatever is wrong with the body."""
    frontend_of(request).require_ready()


async def require_room(request: Request) -> None:
    """Refuses every request before its body is read while the model loads, or the server is full."""
    frontend = frontend_of(request)
    frontend.require_ready()
    if "admission" not in request.scope:  # or it has got a place already
        frontend.admissions.check_room(caller_of(request))
    begin_request(request)


async def require_json(request: Request) -> None:
    kind = (header_of(request, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise NotJson("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")


async def require_generate(request: Request) -> None:
    require_right(request, GENERATE)
    require_task(GENERATE, frontend_of(request).facts.tasks)


ENTRY = [Depends(require_ready), Depends(require_json)]
"""Checks of every endpoint that reads a body."""
COMPUTES = [Depends(require_room), Depends(require_json)]
"""Checks of every endpoint that asks the engine."""
GENERATES = [*COMPUTES, Depends(require_generate)]
"""Checks of every endpoint that generates."""


def admit(request: Request, frontend: Frontend, places: int) -> Admission:
    """Lets in a request for so many sequences, or raises an error. Its endpoint ends the admission."""
    taken = request.scope.get("admission")
    admission = frontend.admissions.admit(caller_of(request), places, taken)
    request.scope["admission"] = admission
    admission.since = request.scope["times"].started
    return admission


async def read_texts(request: Request, body: Body, reading: Reading[R]) -> R:
    """Reads the texts of a body, unless the helper has done so before the endpoint was called."""
    done = request.scope.get(READ)
    if done is not None:
        return done
    frontend = frontend_of(request)
    context = frontend.reading_context
    if reading.work is not None and reading.work(body, context) > LONG:
        # The body is short, but what is to be written of it is not.
        raw = json.dumps(body.model_dump(exclude_unset=True)).encode()
        return (await frontend.helper.read(reading, raw, context.facts)).result
    return reading.read(body, context)


def cancelled_when_client_leaves(
    endpoint: Callable[..., Coroutine[Any, Any, Response]],
) -> Callable[..., Awaitable[Response]]:
    """Decorates an endpoint, so that nothing more is computed for a client that has left."""

    @wraps(endpoint)
    async def respond(request: Request, **arguments: object) -> Response:
        try:
            return await while_connected(request.receive, endpoint(request=request, **arguments))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)

    return respond


async def answer(request: Request, work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """Answers with the result of `work`, which is cancelled if the client goes away."""
    try:
        return json_response(await while_connected(request.receive, work))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)


def with_warnings(response: Response, warnings: Iterable[str]) -> Response:
    """The answer, with headers that say what of the request has no effect."""
    for warning in warnings:
        response.headers.append("Warning", f'299 - "{_printable(warning)}"')
    return response


def _printable(text: str) -> str:
    """What a header may hold of a text that a client may have written."""
    return "".join(char if " " <= char <= "~" and char not in '"\\' else "?" for char in text)[:500]
