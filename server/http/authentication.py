"""Middleware that lets a request pass if its key is valid, and for what it asks."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.client_identity import Caller
from server.access.keyring import OPERATOR, Access
from server.errors import ApiError, Forbidden, Unauthorized
from server.http.error_answers import error_response, path_of
from server.http.middleware import on_head

OPEN_PATHS = frozenset({"/live", "/health", "/ready", "/ping", "/"})
"""Paths that are answered without a key: they tell only whether the server lives, and `/` is a page that asks
for the key."""
PAGE_FOLDER = "/page/"
"""The beginning of the paths of the page's files, which anybody may read."""
DEEP = "deep"
"""The query parameter of /health with which it has the model compute a token."""
ADMIN_PATHS = frozenset({"/metrics", "/load", "/live/events", "/docs", "/openapi.json"})
"""Paths that a key of a file must be an administrator's for."""

KEY_NAME: ContextVar[str] = ContextVar("key_name")
"""The name of the key with which the request of this task came."""


def is_open(scope: Scope) -> bool:
    """Whether anybody may ask this: the page and signs of life, but no check that has the model compute."""
    query: bytes = scope.get("query_string", b"")
    path = path_of(scope)
    if path.startswith(PAGE_FOLDER):
        return True
    return path in OPEN_PATHS and not (query and DEEP in QueryParams(query))


class KeyCheck:
    """Refuses a request without a valid key, unless its path is open to all, and notes who sends others."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or is_open(scope):
            return await self._app(scope, receive, send)
        caller: Caller | None = scope.get("caller") or self._access.holder(scope)
        error = _refusal(scope, caller)
        if error is not None:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await error_response(error, path_of(scope))(scope, receive, send)
        if caller is None or caller is OPERATOR:
            return await self._app(scope, receive, send)
        scope["caller"] = caller
        scope.setdefault("state", {})["key"] = caller.owner
        KEY_NAME.set(caller.owner)
        if (account := caller.account) is not None and account.has_quotas:

            def tell_quotas(head: Message) -> None:
                head["headers"] = [*head.get("headers", ()), *account.headers()]

            send = on_head(send, tell_quotas)
        await self._app(scope, receive, send)


def _refusal(scope: Scope, caller: Caller | None) -> ApiError | None:
    if caller is None:
        return Unauthorized(
            "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key'."
        )
    if (key := caller.key) is None:
        return None
    if key.has_expired():
        return Unauthorized(f"The API key of {key.name} has expired: ask the operator for another one.")
    if path_of(scope) in ADMIN_PATHS and not key.admin:
        return Forbidden(f"The API key of {key.name} may not be used for this: it is for administrators.")
    return None
