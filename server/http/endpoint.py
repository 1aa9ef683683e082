"""The route class of all endpoints: reads the body, checks, calls the function and answers.

FastAPI documents such a route and finds it, but does not run it. Its own handler solves dependencies, opens
exit stacks and wraps the connection anew for each request, which costs more than all of our work on a short
one. An endpoint here is a function of `body` and `request`, and needs none of that. Bodies are bounded in
size, and in the memory of all of them together; how long one may take is watched by its connection.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.request_state import caller_of, state_of
from server.api.fields import check_values, is_long, read_json, unknown_fields
from server.errors import ApiError, TooLarge, Unavailable
from server.http.error_answers import CLIENT_GONE, explain, path_of
from server.http.sse import ClientGone, while_connected
from server.media.inline import InlineFiles
from server.media.prompt import NO_MEDIA, LaidMedia, MediaNeeded
from server.reading.body_table import BY_PATH, CHAT, COMPLETION, OTHER_BODY, Reading

R = TypeVar("R")

MAX_BODY = 16 << 20
RECORDINGS = ("/v1/audio/transcriptions", "/v1/audio/translations")
UPLOADS = frozenset({"/v1/files", *RECORDINGS})
"""The paths of files, which may be longer than other bodies, because they go to the disk as they come."""
MAX_TOGETHER = 256 << 20
"""Bytes of all bodies together that are being read in this process."""
ALWAYS_READ = 64 << 10
"""A body up to so many bytes is read however many others there are: those who hold up long ones delay no
short ones."""
LONG = 1 << 20
"""Bytes of a body above which its memory is given back to the system afterwards."""
TRIM_AFTER = 3.0
"""Seconds from a long body to the search for free memory, which takes up to some hundredths of one."""


_M_TRIM_THRESHOLD = -1
_MOST_FREE = 1 << 20
"""The most bytes that are free at the end of the heap of a thread."""


def bound_free_memory() -> None:
    """Have the heaps of threads give back what is free at their ends: `malloc_trim` leaves it to them.

    Each comes to keep up to 64 MiB otherwise: the bound grows with the largest piece that was freed.
    """
    system = ctypes.CDLL(None)
    if hasattr(system, "mallopt"):  # only glibc has it
        system.mallopt(_M_TRIM_THRESHOLD, _MOST_FREE)


def _give_back() -> None:
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):  # only glibc has it
        system.malloc_trim(0)


class BodyMemory:
    """Counts the bytes of the long bodies that are being read, and gives their memory back to the system.

    The heap keeps what is freed between other things: after 256 MiB of bodies it kept nearly all of that.
    """

    def __init__(self, trim_heap: Callable[[], None] = _give_back) -> None:
        self.taken = 0
        self._trim_heap = trim_heap
        self._trim_is_due = False

    def has_room(self, size: int) -> bool:
        return size <= ALWAYS_READ or self.taken + size <= MAX_TOGETHER

    def give_back(self, size: int) -> None:
        """Count so many bytes no more. Call this in the event loop."""
        self.taken -= size
        if size > LONG and not self._trim_is_due:
            self._trim_is_due = True
            asyncio.get_running_loop().call_later(TRIM_AFTER, self.trim)

    def trim(self) -> None:
        self._trim_is_due = False
        self._trim_heap()


BODY_MEMORY = BodyMemory()


async def read_body(
    receive: Receive, memory: BodyMemory = BODY_MEMORY, *, most: int = MAX_BODY
) -> bytes | bytearray:
    """Returns the whole body, of `most` bytes at most, which is never copied as a whole.

    Raises ClientDisconnect if the connection ends before it.
    """
    body: bytes | bytearray = b""
    size = taken = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            length = len(part)
            size += length
            if size > most:
                raise body_too_large(most)
            if size > ALWAYS_READ:
                if memory.taken + size - taken > MAX_TOGETHER:
                    raise no_room_for_body()
                memory.taken += size - taken
                taken = size
            if size == length:
                body = part
            else:
                body = bytearray(body) if isinstance(body, bytes) else body
                body += part
            if not message.get("more_body", False):
                return body
    finally:
        memory.give_back(taken)


class TakesMedia(Protocol):
    """What says how large media may be."""

    @property
    def most_bytes(self) -> int: ...


def most_bytes(media: TakesMedia | None) -> int:
    """The longest body of any endpoint."""
    return MAX_BODY + (0 if media is None else media.most_bytes)


def body_too_large(most: int = MAX_BODY) -> TooLarge:
    less = "less text" if most <= MAX_BODY else "smaller media, of which --max-media-mb is the limit,"
    return TooLarge(f"The body may have at most {most} bytes: send {less} in one request.")


def no_room_for_body() -> Unavailable:
    return Unavailable(
        f"The server is reading as many long requests as it holds at a time, {MAX_TOGETHER >> 20} MiB. Try "
        "again later, or send less text in one request.",
        retry_after=1,
    )


async def with_media(request: Request, read: Callable[[LaidMedia], Coroutine[Any, Any, R]]) -> R:
    """Reads a body, once more if it needs items that have to be prepared first."""
    state = state_of(request.scope)
    reader, inline = state.frontend.media, state.inline_files
    try:
        found = await read(NO_MEDIA)
    except MediaNeeded as needed:
        caller = caller_of(request)
        key = caller.owner if caller.key else ""
        work = reader.prepare(needed, inline or InlineFiles(), key)
        try:
            items = await while_connected(request.receive, work)
        except ClientGone:
            raise ClientDisconnect from None
        state.media_items = {item.hash: item for item in items.values()}
        found = await read(reader.lay(items))
    if inline is not None:
        inline.check_taken()
    return found


CONTINUED = ("/v1/responses", "/v1/responses/input_tokens")
"""Endpoints whose bodies may name an earlier response to continue."""


async def _expanded(request: Request, raw: bytes | bytearray) -> bytes | bytearray:
    """The body with what it continues, if this server keeps that."""
    kept = request.app.state.runner.kept
    raw = state_of(request.scope).continued = await kept.expand(caller_of(request).key_name, raw)
    return raw


class Endpoint(APIRoute):
    """A route to an async function of `request`, `body` and path parameters, or of some of these.

    Its `dependencies` are async functions of the request, which refuse it by raising an ApiError. They run
    before the body is read, in the order of the list. A long body is read as JSON by the helper process, and
    arrives here with stand-ins for its texts.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        signature = inspect.signature(endpoint, eval_str=True)
        # An older FastAPI looks for the types of a decorated endpoint in the module of the decorator.
        endpoint.__signature__ = signature
        super().__init__(path, endpoint, **options)
        hints = {name: each.annotation for name, each in signature.parameters.items()}
        body = hints.pop("body", None)
        self._validate = None if body is None else TypeAdapter(body).validate_python
        self._reading: Reading[Any] | None = BY_PATH.get(path)
        self._most_bytes = self._reading.most_bytes if self._reading else OTHER_BODY
        self._takes_media = self._reading is not None and self._reading.takes_media
        self._continues = path in CONTINUED
        self._takes_request = hints.pop("request", None) is not None
        if hints.keys() != self.param_convertors.keys():
            raise TypeError(f"{path}: an endpoint takes `body`, `request` and path parameters, not {hints}")
        self.checks = [each.dependency for each in self.dependencies if each.dependency is not None]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.respond

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Overridden so that FastAPI's own handler does not run."""
        if scope["method"] not in self.methods:
            return await super().handle(scope, receive, send)
        request = Request(scope, receive, send)
        state = state_of(scope)
        response: Response | None = None
        try:
            response = await self.respond(request)
            response.raw_headers.extend(state.times.headers())
            if state.embedding_space:
                response.raw_headers.append((b"x-embedding-space", state.embedding_space.encode()))
            await response(scope, receive, send)
        except (ApiError, HTTPException) as error:
            await explain(request, error)(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
        except Exception as error:
            if response is None:
                await explain(request, error)(scope, receive, send)
            raise  # a bug: the HTTP server logs it

    async def respond(self, request: Request) -> Response:
        state, arguments = state_of(request.scope), dict[str, Any]()
        if state.frontend is None:
            state.frontend = request.scope["app"].state.frontend
        if self.param_convertors:
            arguments.update(request.path_params)
        if self._takes_request:
            arguments["request"] = request
        for check in self.checks:
            await check(request)
        if self._validate is not None:
            arguments["body"] = await self._read(request, self._validate)
        return await self.endpoint(**arguments)

    async def _read(self, request: Request, validate: Callable[..., Any]) -> Any:
        state, most = state_of(request.scope), self._most_bytes
        frontend = state.frontend
        media = frontend.media if self._takes_media else None
        if self._reading in (CHAT, COMPLETION) and frontend.facts.ready.worker.row_width:
            most = MAX_BODY  # it may have embeddings
        if media is None:
            raw = await read_body(request.receive, most=min(most, MAX_BODY))
            if self._continues and len(raw := await _expanded(request, raw)) > most:
                raise body_too_large(most)
        else:
            whole = await read_body(request.receive, most=most + media.most_bytes)
            if self._continues:
                whole = await _expanded(request, whole)
            inline = state.inline_files = InlineFiles()
            raw = inline.cut(whole, most)
            if len(raw) > most:
                raise body_too_large(most)
        if type(raw) is not bytes:
            raw = bytes(raw)
        if is_long(raw):
            raw = await self._shortened(request, raw)
        return read_json(raw, validate, unknown_fields(frontend.config.ignore_unknown_fields))

    async def _shortened(self, request: Request, raw: bytes) -> bytes:
        """Has the texts of a long body read, and returns the body with stand-ins for them."""
        if self._reading is None:
            check_values(raw)
            return raw
        state, reading = state_of(request.scope), self._reading
        frontend, facts = state.frontend, state.frontend.facts
        work = with_media(request, lambda media: frontend.helper.read(reading, raw, facts, media))
        BODY_MEMORY.taken += len(raw)
        try:
            found = await while_connected(request.receive, work)
        except ClientGone:
            raise ClientDisconnect from None
        finally:
            BODY_MEMORY.give_back(len(raw))
        state.read = found.result
        return found.body


class PathTable:
    """Finds the endpoint of a path: by one look-up, or else among the few whose paths have parameters.

    FastAPI tries one route after the other, and prepares all of them when it is first asked for any, which
    takes tens of milliseconds. Other methods and unknown paths are left to it.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self._app = app
        routes = [route for router in routers for route in router.routes if isinstance(route, Endpoint)]
        self._endpoints = {
            (method, route.path): route
            for route in routes
            if not route.param_convertors
            for method in route.methods or ()
        }
        self._patterns = [route for route in routes if route.param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http":
            path = path_of(scope)
            endpoint = self._endpoints.get((scope["method"], path)) or self._by_pattern(scope, path)
        if endpoint is None:
            return await self._app(scope, receive, send)
        scope["route"] = endpoint
        await endpoint.handle(scope, receive, send)

    def _by_pattern(self, scope: Scope, path: str) -> Endpoint | None:
        for route in self._patterns:
            found = route.path_regex.match(path) if scope["method"] in route.methods else None
            if found is not None:
                convertors = route.param_convertors
                scope["path_params"] = {
                    name: convertors[name].convert(value) for name, value in found.groupdict().items()
                }
                return route
        return None
