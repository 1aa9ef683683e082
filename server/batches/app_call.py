"""Requests to the server's own application from within its process, which take the way of any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Scope

from engine_core.reason_codes import TOO_LONG
from server.access.client_identity import Caller
from server.access.keyring import OPERATOR, Access
from server.access.request_state import state_of
from server.batches.line_format import pause_of
from server.batches.responses import Turn

PRIORITY = b"1000000000"
"""Above 0, it makes the request background work; under the policy by priority it is the last of all."""
_PART = 1e-3
"""The weight of an owner's work that waits, beside that of its other requests. It has a share of its own,
which gives way to all who are short of places or slots."""
_BUSY = (408, 425, 429, 503)
"""Statuses of a server that may answer later."""
_LOAD_FAILED, _TOO_LATE = b'"type":"load_failed"', b'"type":"deadline_exceeded"'
_TOO_LONG = TOO_LONG.partition(" ")[2].encode()  # its first word begins a sentence there
_MOST_FAILURES = 5
"""After so many failed loads of a model, or ends of the time that a request itself sets, or refusals because
it would take longer than it may even alone, the error is the answer to a request."""


class _Asked(msgspec.Struct):
    """The part of a body that is looked at before its endpoint reads it."""

    timeout: object = None


class Answer(NamedTuple):
    status: int
    body: bytes
    turn: Turn | None = None
    """The turn that the answer adds to a conversation, which is not written yet."""


class OwnerCalls:
    """Sends requests on behalf of the owners of work that waits, in the lowest class of work."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def answer(
        self,
        owner: str,
        path: str,
        body: bytes,
        request_id: str,
        on_part: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """The answer to a request. While the server is busy, it is sent again when the server says so.

        If the model cannot be loaded, or the time that the body sets, or the server, is too short, it is so a
        few times.

        `on_part` gets the parts of an answer that is no error, as they come.
        """
        failures, is_timed = 0, msgspec.json.decode(body, type=_Asked).timeout is not None
        while True:
            scope, turns = _scope(path, request_id), list[Turn]()
            state = state_of(scope)
            state.keep_turn = turns.append
            if (caller := self._caller(owner)) is not None:
                state.caller = caller
            pause, answer = await self._send(scope, body, on_part)
            hopeless = _LOAD_FAILED in answer.body or _TOO_LONG in answer.body
            failures += hopeless or (is_timed and _TOO_LATE in answer.body)
            if answer.status not in _BUSY or failures == _MOST_FAILURES:
                return answer._replace(turn=turns[0]) if turns else answer
            await asyncio.sleep(pause)

    def _caller(self, owner: str) -> Caller | None:
        """The holder of the owner's key, with a small share; None if that key is no longer valid."""
        found = OPERATOR if not owner else self._access.holder_named(owner)
        if found is None:
            return None
        return replace(found, owner=f"{owner} (waiting)", weight=found.weight * _PART, max_queued=None)

    async def _send(
        self, scope: Scope, body: bytes, on_part: Callable[[bytes], None] | None
    ) -> tuple[float, Answer]:
        """An answer, and the seconds after which the same request may be sent again."""
        unread, head, parts = [body], dict[str, object](), list[bytes]()
        retry_after: str | None = None

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await asyncio.Future()  # its client stays until the request is cancelled

        async def send(message: Message) -> None:
            nonlocal retry_after
            if message["type"] == "http.response.start":
                head["status"] = message["status"]
                found = dict(message["headers"]).get(b"retry-after")
                retry_after = None if found is None else found.decode("latin-1")
            elif on_part is not None and head["status"] == 200:
                on_part(message.get("body", b""))
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        status = head.get("status")
        return pause_of(retry_after), Answer(status if isinstance(status, int) else 500, b"".join(parts))


def _scope(path: str, request_id: str) -> Scope:
    headers = {b"host": b"localhost", b"content-type": b"application/json", b"x-priority": PRIORITY}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": None,
        "client": None,
        "headers": [*headers.items(), (b"x-request-id", request_id.encode())],
    }
