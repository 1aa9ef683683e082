"""Gives each request that names an adapter to that, before its endpoint sees it: its body says which."""

from __future__ import annotations

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError
from server.frontend.adapters import ServedAdapters
from server.http.endpoint import most_bytes, read_body
from server.http.error_answers import CLIENT_GONE, error_response, path_of
from server.reading.body_table import BY_PATH
from server.routes.model_choice import NAMED_BY, RECORDINGS, read_asked, with_body


class AdapterChoice:
    def __init__(self, app: ASGIApp, adapters: ServedAdapters) -> None:
        self._app, self._adapters = app, adapters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope["type"] == "http" else ""
        named = path in BY_PATH and path not in RECORDINGS and scope["method"] == "POST"
        if not named or not self._adapters.states:
            return await self._app(scope, receive, send)
        try:
            self._adapters.frontend.require_ready()
            raw = bytes(await read_body(receive, most=most_bytes(self._adapters.frontend.media)))
            self._choose(scope, raw)
        except ApiError as error:
            return await error_response(error, path)(scope, receive, send)
        except ClientDisconnect:
            return await Response(status_code=CLIENT_GONE)(scope, receive, send)
        await self._app(scope, with_body(raw, receive), send)

    def _choose(self, scope: Scope, raw: bytes) -> None:
        asked = read_asked(raw)
        named = None if asked is None else asked.model or asked.name
        if not isinstance(named, str) or not named:
            headers = (value.decode("latin-1") for name, value in scope["headers"] if name == NAMED_BY)
            named = next(headers, None)
        if named is None:
            return
        base = self._adapters.frontend
        if (state := self._adapters.find(named)) is not None:
            scope["frontend"] = self._adapters.adapted(state)
        elif not (base.facts.is_name(named) or base.config.is_own_path(named)):
            raise self._adapters.unknown(named)
