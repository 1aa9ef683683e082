"""Middleware that every HTTP request passes before its route: metrics, request ids, header checks.

Plain ASGI, because it runs for every message of every answer.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, BadRequest, HttpError
from server.http import body
from server.http.allowed_hosts import HostRules
from server.http.error_answers import error_response, path_of
from server.metrics.server_metrics import Metrics
from server.requests.timing import RequestTimes

HOST = re.compile(rb"[^\s/\\?#@]+")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def on_head(send: Send, act: Callable[[Message], None]) -> Send:
    """Makes a `send` that calls `act` with the message that begins the answer, which may change it."""

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            act(message)
        await send(message)

    return watched


class HttpMetrics:
    """Counts and times each request by the path of its route, never by the path that the client wrote.

    It is the outermost of all, and gives back the places that a request has in the server.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = time.monotonic()
        status = 500

        def note_status(head: Message) -> None:
            nonlocal status
            status = head["status"]

        try:
            await self._app(scope, receive, on_head(send, note_status))
        finally:
            if (admission := scope.get("admission")) is not None:
                admission.release()
            handler = getattr(scope.get("route"), "path", "none")
            self._metrics.http(handler, _known_method(scope["method"]), status, time.monotonic() - started)


def _known_method(method: str) -> str:
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "OTHER"


class RequestIds:
    """Gives each answer an X-Request-Id: the client's own, if it is well-formed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        def add_id(head: Message) -> None:
            MutableHeaders(scope=head)["X-Request-Id"] = request_id

        await self._app(scope, receive, on_head(send, add_id))


class TimingHeaders:
    """Tells the times of each whole answer in headers of their own. A stream's head is sent before them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def add_times(head: Message) -> None:
            times: RequestTimes | None = scope.get("times")
            if times is not None:
                head["headers"] = [*head.get("headers", ()), *times.named_headers()]

        await self._app(scope, receive, on_head(send, add_times))


class HeaderChecks:
    """Refuses a request whose headers show that it is meant for another host, comes from a foreign web page,
    or announces a body that is not taken."""

    def __init__(self, app: ASGIApp, hosts: HostRules) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        error = self._refusal(scope)
        if error is not None:
            # Closed, or the rest of the body would be read as the next request.
            return await error_response(error, path_of(scope), close=True)(scope, receive, send)
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        raw: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value for name, value in raw if name == b"host"]
        if scope["http_version"] == "1.1" and (len(hosts) != 1 or not HOST.fullmatch(hosts[0])):
            return BadRequest("The request needs one header Host, with a host and perhaps a port.")
        headers = dict(reversed(raw))  # of several headers with one name the first counts
        if hosts and (foreign := self._hosts.refusal(hosts[0], headers.get(b"origin"))):
            return foreign
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > body.MAX_BODY:
            return body.body_too_large()
        if headers.get(b"content-encoding", b"identity") != b"identity":
            return HttpError(415, "Compressed bodies are not accepted: send the body as it is.")
        if length.isdigit() and not body.BODY_MEMORY.has_room(int(length)):
            return body.no_room_for_body()
        return None
