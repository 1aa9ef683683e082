"""Gives each request that names an adapter to that, before its endpoint sees it: its body says which."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.request_state import path_of, state_of
from server.errors import ApiError
from server.frontend.adapters import ServedAdapters
from server.frontend.frontend import Frontend
from server.http.connection.body_limits import ALWAYS_READ, BODY_MEMORY, most_bytes, read_body
from server.http.error_answers import CLIENT_GONE, error_response
from server.http.sse import ClientWatch
from server.routes.model_choice import (
    MODEL_PATHS,
    RECORDINGS,
    has_waited,
    is_for_a_model,
    latest_begin,
    name_asked,
    read_asked,
    task_asked,
    with_body,
)
from server.schemas.unknown_fields import in_clients_words


class AdapterChoice:
    def __init__(self, app: ASGIApp, frontend: Frontend) -> None:
        self._app, self._frontend = app, frontend

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # Those of a checkpoint are known when it is there, which a server does not wait for.
        adapters: ServedAdapters | None = self._frontend.adapters
        if adapters is not None and scope["type"] == "http" and adapters.may_be_named:
            path = path_of(scope)
            if path in MODEL_PATHS and path not in RECORDINGS and is_for_a_model(scope, path):
                return self._read(adapters, path, scope, receive, send)
        return self._app(scope, receive, send)

    async def _read(
        self, adapters: ServedAdapters, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        raw = b""
        try:
            self._frontend.require_ready()
            raw = bytes(await read_body(receive, most=most_bytes(self._frontend.media)))
            await self._choose(adapters, scope, receive, raw)
        except ApiError as error:
            asked = read_asked(raw)
            in_clients_words(error, {"model": "lora_path"} if asked and asked.lora_path else {})
            return await error_response(error, path)(scope, receive, send)
        except ClientDisconnect:
            return await Response(status_code=CLIENT_GONE)(scope, receive, send)
        await self._app(scope, with_body(raw, receive), send)

    async def _choose(self, adapters: ServedAdapters, scope: Scope, receive: Receive, raw: bytes) -> None:
        asked = read_asked(raw)
        named, task = name_asked(scope, asked), task_asked(path_of(scope), asked)
        own = adapters.of_task(named, task)
        if named is None and own is None:
            return
        if (frontend := own or adapters.chosen(str(named))) is not None:
            state_of(scope).frontend = frontend
            return
        until = latest_begin(scope, self._frontend.config.access)
        held = len(raw) if len(raw) > ALWAYS_READ else 0
        BODY_MEMORY.taken += held
        try:
            with ClientWatch(receive):
                seconds = until and until - time.monotonic()
                state_of(scope).frontend = await asyncio.wait_for(adapters.look_for(str(named)), seconds)
        except TimeoutError:
            raise has_waited() from None
        finally:
            BODY_MEMORY.give_back(held)
