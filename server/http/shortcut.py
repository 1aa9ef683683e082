"""The short way to the endpoints that take a body: FastAPI describes them, this calls them.

Routing, dependencies and responses of the framework cost more than all of our own work on a short request,
and an endpoint needs little of that: its body as an object. What is wrong with a body is FastAPI's to say:
whatever cannot be read here goes there as it came.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import HTTPException
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from server.errors import ApiError
from server.http.middleware import CLIENT_GONE, path_of

Check = Callable[[Request], Awaitable[None]]

_parse = msgspec.json.Decoder().decode
"""What this reads, the standard library reads as the same. It reads less: no NaN, no halves of surrogates."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One that takes `body` and `request`, and returns its response."""

    route: APIRoute
    checks: tuple[Check, ...]
    """Of who may enter; they refuse by raising."""
    validate: Callable[[object], Any]


def find_endpoints(routers: Iterable[APIRouter]) -> dict[str, Endpoint]:
    """By path: all that can be called without the framework's help."""
    return dict(found for router in routers for route in router.routes for found in _endpoint(route))


def _endpoint(route: object) -> Iterator[tuple[str, Endpoint]]:
    if not isinstance(route, APIRoute) or route.methods != {"POST"}:
        return
    hints = get_type_hints(route.endpoint, include_extras=True)
    if hints.keys() == {"body", "request", "return"}:
        checks = tuple(each.dependency for each in route.dependencies if each.dependency is not None)
        yield route.path, Endpoint(route, checks, TypeAdapter(hints["body"]).validate_python)


class Shortcut:
    def __init__(
        self,
        app: FastAPI,
        endpoints: dict[str, Endpoint],
        explain: Callable[[Request, Exception], Response],
    ) -> None:
        """`explain` makes an answer of an error."""
        self._app = app
        self._endpoints = endpoints
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(path_of(scope))
        if endpoint is None:
            return await self._app(scope, receive, send)
        scope["app"] = self._app  # where endpoints find what they need
        scope["route"] = endpoint.route  # what the request is counted as
        request = Request(scope, receive, send)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            raw = await request.body()
            body = await _read(raw, endpoint, request)
            if body is None:
                return await self._app(scope, _again(raw, receive), watched)
            response = await endpoint.route.endpoint(body=body, request=request)
            await response(scope, receive, watched)
        except (ApiError, HTTPException) as error:
            await self._explain(request, error)(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
        except Exception as error:  # a mistake of ours: told, and left to whoever logs it
            if not started:
                await self._explain(request, error)(scope, receive, send)
            raise


async def _read(raw: bytes, endpoint: Endpoint, request: Request) -> Any:
    """The body as the endpoint wants it, or None.

    In the framework's order, so that of two errors the same one is told.
    """
    try:
        content = _parse(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for check in endpoint.checks:
        await check(request)
    try:
        return endpoint.validate(content)
    except ValidationError:
        return None


def _again(raw: bytes, receive: Receive) -> Receive:
    """A body that was read, to be read once more."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return again
