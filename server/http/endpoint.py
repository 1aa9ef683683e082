"""The route class of all endpoints: checks a request, reads its body and calls the function that answers.

FastAPI runs it by its documented extension point, `APIRoute.get_route_handler`; `PathTable` finds and runs
plain paths. FastAPI's own handler would read a body whole before any check, and cannot have a long one read
in another process. Bodies are bounded in size, and in the memory of all of them together; how long one may
take is watched by its connection.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar, get_args

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.request_state import RequestState, path_of, state_of
from server.errors import ApiError, BadRequest
from server.http.connection import body_limits
from server.http.error_answers import CLIENT_GONE, DIALECT, explain
from server.http.sse import ClientWatch
from server.http.warnings import tell_unknown
from server.media.inline_files import InlineFiles
from server.options.server_flags import DIALECTS
from server.reading.body_table import CHAT, COMPLETION, OTHER_BODY, Reading
from server.reading.endpoint_table import BY_PATH, ModelEndpoint
from server.schemas.body import check_values, is_long, read_json
from server.schemas.unknown_fields import FieldNotes, in_clients_words

R = TypeVar("R")

log = logging.getLogger(__name__)


class NotJson(BadRequest):
    type = "Bad Request"


def check_entry(state: RequestState, row: ModelEndpoint) -> None:
    """Refuses a request to an endpoint of the table, by its head alone."""
    frontend = state.frontend
    frontend.require_ready()
    if row.use is not None:
        if state.admission is None:  # or it has got a place already
            frontend.admissions.check_room(state.caller)
        state.count()
    if row.needs_json and state.head.get(b"content-type") != b"application/json":
        check_json(state)
    if row.use is not None:
        state.require_right(*row.use.rights)
        row.use.require(frontend.facts)


def check_json(state: RequestState) -> None:
    kind = (state.header(b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise NotJson(
            "Unsupported Media Type: Only 'application/json' is allowed. Set the header Content-Type, and "
            "send JSON."
        )


async def require_ready(request: Request) -> None:
    """Refuses every request with 503 while the model loads, whatever is wrong with the body."""
    state_of(request.scope).frontend.require_ready()


async def require_json(request: Request) -> None:
    check_json(state_of(request.scope))


ENTRY = [Depends(require_ready), Depends(require_json)]
"""Checks of an endpoint with a body that is not in the table."""


async def _expanded(request: Request, raw: bytes | bytearray) -> bytes | bytearray:
    """The body with what it continues, if this server keeps that."""
    kept = request.app.state.runner.kept
    state = state_of(request.scope)
    state.sent, state.continued = raw, await kept.expand(state.caller.key_name, raw)
    return state.continued


class BodyForm:
    """One form of an endpoint's body."""

    __slots__ = ("most_bytes", "reading", "takes_media", "takes_rows", "validate")

    def __init__(self, kind: Any, reading: Reading[Any] | None = None, most_bytes: int = OTHER_BODY) -> None:
        """`reading` says how a body of this type is read, if it may be long."""
        self.reading, self.most_bytes = reading, most_bytes
        self.takes_media = reading is not None and reading.takes_media
        self.takes_rows = reading is CHAT or reading is COMPLETION
        """Whether it may have embeddings in place of tokens, if the model takes them."""
        self.validate = TypeAdapter(kind).validate_python

    @classmethod
    def of(cls, reading: Reading[Any]) -> BodyForm:
        return cls(reading.body, reading, reading.most_bytes)


class Endpoint(APIRoute):
    """A route to an async function of `request`, `body` and path parameters, or of some of these.

    Before the body is read, what the table of endpoints says of the path is checked, and then `dependencies`,
    async functions of the request, may refuse it by raising an ApiError. A long body is read as JSON by the
    helper process, and arrives here with stand-ins for its texts. A function that asks the model is cancelled
    when its client leaves, and so computes nothing for nobody.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        signature = inspect.signature(endpoint, eval_str=True)
        # An older FastAPI looks for the types of a decorated endpoint in the module of the decorator.
        endpoint.__signature__ = signature
        super().__init__(path, endpoint, **options)
        hints = {name: each.annotation for name, each in signature.parameters.items()}
        body = hints.pop("body", None)
        self._row = row = BY_PATH.get(path) if "POST" in (self.methods or ()) else None
        self._takes_body = body is not None
        self._asks_model = row is not None and self._takes_body
        self._usual = _form_of(body, row)
        self._dialects = {} if row is None else {name: BodyForm.of(one) for name, one in row.dialects.items()}
        self._takes_request = hints.pop("request", None) is not None
        if hints.keys() != self.param_convertors.keys():
            raise TypeError(f"{path}: an endpoint takes `body`, `request` and path parameters, not {hints}")
        self.checks = [each.dependency for each in self.dependencies if each.dependency is not None]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.answer

    async def answer(self, request: Request) -> Response:
        """Answers a request. An error that its client may see is raised, for whoever runs this to explain."""
        state = state_of(request.scope)
        try:
            response = await self.respond(request, state)
        except ApiError as error:
            _name_fields(error, state)
            raise
        except (HTTPException, ClientDisconnect):
            raise
        except Exception as error:
            log.exception("%s %s failed", request.method, self.path)
            return explain(request, error)
        response.raw_headers.extend(state.times.headers())
        if state.notes is not None and state.notes.foreign:
            tell_unknown(response, state.notes, state.caller.owner)
        return response

    async def respond(self, request: Request, state: RequestState) -> Response:
        arguments: dict[str, Any] = {}
        state.arrive(request.scope)
        if self.param_convertors:
            arguments.update(request.path_params)
        if self._takes_request:
            arguments["request"] = request
        if self._row is not None:
            check_entry(state, self._row)
        for check in self.checks:
            await check(request)
        if self._takes_body:
            arguments["body"] = await self._read(request, state)
        if not self._asks_model:
            return await self.endpoint(**arguments)
        with ClientWatch(request.receive):
            return await self.endpoint(**arguments)

    async def _read(self, request: Request, state: RequestState) -> Any:
        form, frontend = self._form(state) if self._dialects else self._usual, state.frontend
        state.reading = form.reading
        most, media = form.most_bytes, frontend.media if form.takes_media else None
        continues = self._row is not None and self._row.continues
        if form.takes_rows and frontend.facts.ready.worker.row_width:
            most = body_limits.MAX_BODY
        if media is None:
            raw = await body_limits.read_body(request.receive, most=min(most, body_limits.MAX_BODY))
            if continues and len(raw := await _expanded(request, raw)) > most:
                raise body_limits.body_too_large(most)
        else:
            whole = await body_limits.read_body(request.receive, most=most + media.most_bytes)
            if continues:
                whole = await _expanded(request, whole)
            inline = state.inline_files = InlineFiles()
            raw = inline.cut(whole, most)
            if len(raw) > most:
                raise body_limits.body_too_large(most)
        if type(raw) is not bytes:
            raw = bytes(raw)
        state.notes = FieldNotes(frontend.config.strict_fields)
        if is_long(raw):
            raw = await _shortened(request, state, raw)
        return read_json(raw, form.validate, state.notes)

    def _form(self, state: RequestState) -> BodyForm:
        """The form of the body in the dialect that the request names, or else the operator."""
        dialect = state.header(DIALECT) or state.frontend.config.dialect
        if dialect not in DIALECTS:
            raise BadRequest(
                f"X-Facet-Dialect must be one of {', '.join(DIALECTS)}, got {dialect[:64]!r}.",
                "X-Facet-Dialect",
            )
        return self._dialects.get(dialect, self._usual)


def _form_of(body: Any, row: ModelEndpoint | None) -> BodyForm:
    """The form of a body that a function takes: the one in the table, or one that is never long."""
    if row is None or row.reading is None:
        return BodyForm(body)
    assert body is row.reading.body or row.reading.body in get_args(body), row
    return BodyForm.of(row.reading)


async def _shortened(request: Request, state: RequestState, raw: bytes) -> bytes:
    """Has the texts of a long body read, and returns the body with stand-ins for them."""
    reading, frontend = state.reading, state.frontend
    if reading is None:
        check_values(raw)
        return raw
    given, read, owner = (reading, raw, frontend.facts), frontend.long_bodies.read, state.caller.owner
    body_limits.BODY_MEMORY.taken += len(raw)
    try:
        with ClientWatch(request.receive):
            found = await state.read_with_media(lambda media: read(*given, media, owner=owner))
    finally:
        body_limits.BODY_MEMORY.give_back(len(raw))
    state.read, state.notes = found.result, found.notes
    return found.body


def _name_fields(error: ApiError, state: RequestState) -> None:
    """Has an error call fields as the client does."""
    names = {} if state.reading is None else state.reading.body.client_names
    if state.notes is not None:
        said = state.notes.client_names
        names = {**{ours: said.get(theirs, theirs) for ours, theirs in names.items()}, **said}
    in_clients_words(error, names)


class PathTable:
    """Finds the endpoint of a path without parameters by one look-up, and runs it instead of FastAPI.

    docs/decisions/0056-what-of-fastapi-runs.md says what that spares. Other methods, unknown paths, and paths
    with parameters are FastAPI's.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        """Takes the endpoints of these routers; of two with one path the later."""
        self._app = app
        self._endpoints = {
            (method, route.path): route
            for router in routers
            for route in router.routes
            if isinstance(route, Endpoint) and not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], path_of(scope))) if scope["type"] == "http" else None
        if endpoint is None:
            return await self._app(scope, receive, send)
        scope["route"] = endpoint
        request = Request(scope, receive, send)
        try:
            response = await endpoint.answer(request)
            await response(scope, receive, send)
        except (ApiError, HTTPException) as error:
            await explain(request, error)(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
