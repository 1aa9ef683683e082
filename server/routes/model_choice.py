"""Gives each request of a server of several models to the one that it names, once that is loaded.

It stands before the table of endpoints, behind the check of keys: strangers have nothing loaded. A body is
read here, as its model stands in it, and a form with a recording as far as its model. While a model loads, a
stream that was asked for tells how far that is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext

import msgspec
from fastapi import APIRouter
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.client_identity import RETRY_SECONDS, TIMEOUT, Caller, limits_of
from server.access.request_state import path_of, state_of
from server.errors import (
    ANTHROPIC,
    OLLAMA,
    ApiError,
    HttpError,
    NotFound,
    TooLate,
    error_body,
)
from server.frontend.adapters import ServedAdapters
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels, Named
from server.http.connection.body_limits import ALWAYS_READ, BODY_MEMORY, RECORDINGS, most_bytes, read_body
from server.http.endpoint import Endpoint
from server.http.error_answers import CLIENT_GONE, error_response
from server.http.middleware import DEEP
from server.http.multipart import FormReader, peeked_form
from server.http.sse import OPEN_AFTER, ClientWatch, encode, on_one_line
from server.options.server_flags import AccessOptions
from server.reading.body_table import EMBEDDINGS
from server.reading.endpoint_table import BY_PATH
from server.routes.ollama.generating import may_unload, without_prompt
from server.schemas.audio.form import FORM_BYTES, MOST_FIELDS, recording_too_large
from server.schemas.moderations import OPENAI

NAMED_BY = b"x-model"
"""The header that names the model where an API has no field for it."""
COMMENT_SECONDS = 1.0
"""Seconds between two comments on a load in a stream."""

_BY_GET = frozenset(
    {"/info", "/tokenizer_info", "/props", "/slots", "/get_model_info", "/model_info", "/health_generate"}
)
_SHOW = "/api/show"
MODEL_PATHS = frozenset({*BY_PATH, "/", "/invocations", _SHOW}) | _BY_GET
"""Paths whose requests are for one model."""
_MODERATIONS, _OLLAMA_CHAT, _OLLAMA_GENERATE = "/v1/moderations", "/api/chat", "/api/generate"
_HEALTH = frozenset({"/health", "/ready", "/ping"})
_LEFT_OUT = frozenset({"/sleep", "/wake_up", "/is_sleeping"})
"""Paths of operators that mean the only model of a server."""
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class _Asked(msgspec.Struct):
    """The model that a body names. Whatever is wrong with the body is refused where it is read."""

    model: object = None
    name: object = None
    lora_path: object = None
    stream: object = None
    task: object = None
    keep_alive: object = None


class _Prompt(msgspec.Struct):
    """What a body of Ollama's has to answer."""

    prompt: object = None
    suffix: object = None
    images: object = None
    messages: object = None


class ModelChoice:
    def __init__(self, app: ASGIApp, models: ManyModels) -> None:
        self._app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = path_of(scope)
        if path in _LEFT_OUT:
            error = HttpError(
                404, f"{path} is for servers of one model: see POST /models/load and /models/unload."
            )
            return await error_response(error, path)(scope, receive, send)
        if not is_for_a_model(scope, path):
            return await self._app(scope, receive, send)
        try:
            await self._answer(scope, receive, send, path)
        except ApiError as error:
            await error_response(error, path)(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        self._models.require_ready()
        if path in RECORDINGS:
            async with self._peeked_form(scope, receive) as (asked, receive):
                return await self._answer_asked(scope, receive, send, asked)
        raw = b""
        if scope["method"] != "GET":
            raw = bytes(await read_body(receive, most=most_bytes(self._models.media)))
        await self._answer_asked(scope, receive, send, read_asked(raw), raw)

    @asynccontextmanager
    async def _peeked_form(self, scope: Scope, receive: Receive) -> AsyncGenerator[tuple[_Asked, Receive]]:
        """Yields the model that the form of a recording names, and what receives the form: if a header names
        the model, the form is not read before that one is loaded."""
        request = Request(scope, receive)
        if NAMED_BY.decode() in request.headers:
            yield _Asked(), receive
            return
        reader = FormReader(request.headers.get("content-type", ""), most_fields=MOST_FIELDS)
        most = max(state.entry.config.media.max_audio_mb for state in self._models.states) << 20
        peeked = peeked_form(reader, "model", receive, most + FORM_BYTES, recording_too_large(most))
        async with peeked as (model, receive_again):
            yield _Asked(model), receive_again

    async def _answer_asked(
        self, scope: Scope, receive: Receive, send: Send, asked: _Asked | None, raw: bytes = b""
    ) -> None:
        """Answers with the model that is asked for. `raw` is the body, but for a form, which is received."""
        path = path_of(scope)
        recorded = path in RECORDINGS
        request = state_of(scope)
        caller = request.caller
        named = self._find(scope, asked, caller)
        state = named.state
        if recorded and named.adapter:
            raise NotFound(f"`{named.adapter}` is an adapter, and those answer no recordings.", "model")
        request.caller = caller.for_model(self._models.names_of(state)) or caller
        unloads = path.startswith(OLLAMA) and asked is not None and may_unload(asked.keep_alive, caller)
        if unloads and is_without_prompt(path, raw):  # whatever the model does
            found = without_prompt(state.entry.name, "unload", is_chat=path == _OLLAMA_CHAT)
            await found(scope, receive, send)
            await self._models.unload(state)
            return
        if path == _SHOW and state.shown and state.slot.served is None and not named.adapter:
            return await JSONResponse(state.shown)(scope, receive, send)  # clients ask of each model listed
        from_outside = scope["server"] is not None  # calls of this server's own want the status of an error
        answer = _Answer(send, path, from_outside and asked is not None and asked.stream is True)
        held = len(raw) if len(raw) > ALWAYS_READ else 0
        BODY_MEMORY.taken += held
        async with AsyncExitStack() as stack:
            try:
                with nullcontext() if recorded else ClientWatch(receive):
                    await self._wait(scope, receive, stack, named, answer)
                if (task := task_asked(path, asked)) is not None:
                    adapters: ServedAdapters | None = request.frontend.adapters
                    own = adapters and adapters.of_task(named.adapter or None, task)
                    request.frontend = own or request.frontend
            except ApiError as error:
                if not answer.has_begun:
                    raise
                return await answer.break_off(encode(error_body(error, path)))
            finally:
                BODY_MEMORY.give_back(held)
            await self._app(scope, receive if recorded else with_body(raw, receive), answer.send)
        if unloads:
            await self._models.unload(state)

    def _find(self, scope: Scope, asked: _Asked | None, caller: Caller) -> Named:
        named = name_asked(scope, asked)
        if path_of(scope) == _MODERATIONS and (classifier := self._moderating(named, caller)) is not None:
            return classifier
        if (
            named is None and asked is None and scope["method"] != "GET"
        ):  # it is refused, by whichever is there
            loaded = (Named(one) for _, one in self._models.named(caller) if one.slot.served is not None)
            return next(loaded, None) or self._models.find_named(None, caller)
        return self._models.find_named(named, caller)

    def _moderating(self, named: str | None, caller: Caller) -> Named | None:
        """The first model with labels, for those who name none, or one of OpenAI's that is not here."""
        names = dict(self._models.named(caller))
        if named is not None and (named in names or named not in OPENAI):
            return None
        return next((Named(state) for state in names.values() if state.labels > 1), None)

    async def _wait(
        self, scope: Scope, receive: Receive, stack: AsyncExitStack, named: Named, answer: _Answer
    ) -> None:
        """Enter a model when it is loaded, and its adapter is found."""
        state = named.state
        until = latest_begin(scope, self._models.config.access)
        own = scope["server"] is None  # a line of a batch, or a response in the background
        using = self._models.using(state, background=own)
        entering = asyncio.ensure_future(_enter(stack, using, named.adapter))
        patience = OPEN_AFTER
        try:
            while not entering.done():
                left = patience if until is None else min(patience, until - time.monotonic())
                if left <= 0:
                    raise has_waited()
                await asyncio.wait([entering], timeout=left)
                if not entering.done():
                    await answer.tell(f"loading {state.slot.name}: {state.progress}")
                    patience = COMMENT_SECONDS
            state_of(scope).frontend = entering.result()
        finally:
            entering.cancel()
            await asyncio.wait([entering])


async def _enter(
    stack: AsyncExitStack, using: AbstractAsyncContextManager[Frontend], adapter: str
) -> Frontend:
    frontend = await stack.enter_async_context(using)
    return await frontend.adapters.frontend_of(adapter) if adapter else frontend


class _Answer:
    """An answer that may have begun, with comments on a load, before its endpoint is called."""

    def __init__(self, send: Send, path: str, streams: bool) -> None:
        self.has_begun = False
        self._send, self._path = send, path
        self._comments = streams and not path.startswith(OLLAMA)  # whose streams are lines of JSON
        self._status = 200
        self._error = b""
        """The body of an error that comes after the head of a stream."""

    async def tell(self, words: str) -> None:
        """Send a comment, if this is a stream that may have some."""
        if not self._comments:
            return
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})
        await self._write(b": %s\n\n" % words.encode())

    async def send(self, message: Message) -> None:
        """Pass on what the endpoint sends, but for a second head."""
        if not self.has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self.break_off(self._error)

    async def break_off(self, error: bytes) -> None:
        """End a stream that has begun with an error."""
        named = self._path.startswith((ANTHROPIC, "/v1/responses"))
        data = b"%sdata: %s\n\n" % (b"event: error\n" if named else b"", on_one_line(error))
        await self._write(data, more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def is_for_a_model(scope: Scope, path: str) -> bool:
    if path in MODEL_PATHS:
        return scope["method"] == "POST" or (scope["method"] == "GET" and path in _BY_GET)
    return path in _HEALTH and DEEP in QueryParams(scope.get("query_string", b""))


def is_without_prompt(path: str, raw: bytes) -> bool:
    """Whether there is nothing to answer: a client only has the model loaded or unloaded so."""
    found = msgspec.json.decode(raw, type=_Prompt)
    if path == _OLLAMA_CHAT:
        return not found.messages
    return path == _OLLAMA_GENERATE and not (found.prompt or found.suffix or found.images)


def read_asked(raw: bytes) -> _Asked | None:
    try:
        return msgspec.json.decode(raw, type=_Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def task_asked(path: str, asked: _Asked | None) -> object:
    """The task that a request for vectors names; None: it names none, or is another request."""
    row = BY_PATH.get(path)
    return asked.task if asked is not None and row is not None and row.reading is EMBEDDINGS else None


def name_asked(scope: Scope, asked: _Asked | None) -> str | None:
    """The model that a request names, in its body or else in a header."""
    named = None if asked is None else asked.lora_path or asked.model or asked.name
    if isinstance(named, str) and named:
        return named
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == NAMED_BY), None)


def latest_begin(scope: Scope, options: AccessOptions) -> float | None:
    """The time until which a request may wait for its model, if that is bounded."""
    named = next((value for name, value in scope["headers"] if name == TIMEOUT), None)
    limits = limits_of(named, options, state_of(scope).times.started, None)
    return None if limits is None else min(limits.begins, limits.ends)


def has_waited() -> TooLate:
    return TooLate("The request has exceeded its time limit while it waited.", retry_after=RETRY_SECONDS)


def with_body(raw: bytes, receive: Receive) -> Receive:
    """What receives a body that was read already, and then whatever comes after it."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return receive_again


async def forward(request: Request, raw: bytes, path: str, routers: Sequence[APIRouter]) -> Response:
    """Has the endpoint of another path answer a request whose body was read."""
    routes = (route for router in routers for route in router.routes)
    found = next(route for route in routes if isinstance(route, Endpoint) and route.path == path)
    return await found.respond(
        Request(request.scope, with_body(raw, request.receive)), state_of(request.scope)
    )
