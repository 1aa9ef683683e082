"""Sends answers: as server-sent events while they grow, or whole. Both end if the client goes away.

A stream that is complete ends in an event that says so, which is `[DONE]` for completions. One that broke off
ends in an error event instead, so that a truncated answer never looks finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from types import TracebackType
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine_core.protocol import Standing
from server.access.request_state import KEY, RequestState
from server.errors import ApiError, Internal

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = "keep-alive"
"""The comment in a stream of which there is nothing to say but that it lives."""

WATCH_AFTER = 0.02
"""Seconds before a task watches for the client's leaving: most errors and many short answers come sooner."""

OPEN_AFTER = 1.0
"""Seconds for which an answer that has not begun may still become an error with a status of its own.

After them the headers are sent, so that no client or proxy takes a long prompt for a dead server."""

PIECE_BYTES = 256 << 10
"""A list longer than this many bytes is written in pieces."""

JSON = "application/json"

encode = msgspec.json.Encoder().encode

_LINE_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))
"""Characters that JSON may hold as they are and that clients which split lines as Unicode does take for ends
of lines, as Python's `str.splitlines` does and so httpx's `iter_lines`; and how JSON escapes them."""


def on_one_line(data: bytes) -> bytes:
    """Returns events of JSON with the characters escaped at which such clients would cut them."""
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


def event(message: msgspec.Struct) -> bytes:
    return b"data: " + encode(message) + b"\n\n"


def named_event(name: str, message: msgspec.Struct) -> bytes:
    """An event with a name, as Responses and Anthropic's Messages have them."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(message))


@dataclass(frozen=True, slots=True)
class StreamForm:
    """The events with which one API ends its streams, and fills silences in them."""

    is_last: Callable[[bytes], bool]
    """Whether these events, the last that were made, end the stream."""
    error_event: Callable[[ApiError], bytes]
    """Makes the events that end a stream which breaks off."""
    ping: bytes = b""
    """What is sent during silences, behind the comment if that says more than that the stream lives."""
    media_type: str = "text/event-stream"
    has_comments: bool = True
    """Whether a comment may be sent during silences."""


DONE_FORM = StreamForm(
    is_last=methodcaller("endswith", DONE),
    error_event=lambda error: b"data: " + encode(error.body()) + b"\n\n",
)
"""Streams of completions: a last event `[DONE]`, or an error in the shape of all answers."""


class Chunks:
    """Makes the events of one stream. The part that all of them repeat is encoded once."""

    def __init__(self, empty: msgspec.Struct) -> None:
        """`empty` is a chunk that ends in the empty list of its choices."""
        self._head = b"data: " + encode(empty).removesuffix(b"]}")

    def event(
        self, choice: msgspec.Struct | None, usage: msgspec.Struct | UnsetType = UNSET, **more: object
    ) -> bytes:
        """An event with this choice, or none. `more` are further fields behind the usage."""
        data = b"" if choice is None else encode(choice)
        tail = b"]" if isinstance(usage, UnsetType) else b'],"usage":' + encode(usage)
        for name, value in more.items():
            tail += b',"%s":%s' % (name.encode(), encode(value))
        return self._head + data + tail + b"}\n\n"


def json_response(message: msgspec.Struct) -> Response:
    return Response(encode(message), media_type=JSON)


def list_response(entries: Iterable[bytes], around: bytes = b"[]") -> Response:
    """Answers with a list of entries of JSON, in pieces if it is long; later pieces are made in threads.

    `around` is what stands around the entries: JSON whose last empty list they fill.
    """
    before, _, after = around.rpartition(b"[]")
    pieces = _pieces(entries, before + b"[", b"]" + after)
    first = next(pieces)
    second = next(pieces, None)
    if second is None:
        return Response(first, media_type=JSON)
    return StreamingResponse(chain([first, second], pieces), media_type=JSON)


def _pieces(entries: Iterable[bytes], before: bytes, after: bytes) -> Iterator[bytes]:
    gathered, size = [before], 0
    for number, entry in enumerate(entries):
        gathered.append(b"," + entry if number else entry)
        size += len(entry)
        if size >= PIECE_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    gathered.append(after)
    yield b"".join(gathered)


class ClientWatch:
    """Cancels what runs in its `with` when the client goes away, and raises ClientDisconnect then."""

    __slots__ = ("_gone", "_receive", "_task", "_watching")

    def __init__(self, receive: Receive) -> None:
        self._receive, self._gone = receive, False

    def __enter__(self) -> None:
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._watching = _DelayedTask(WATCH_AFTER, self._watch)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.stop()
        if self._gone and isinstance(error, asyncio.CancelledError) and not self._task.uncancel():
            raise ClientDisconnect from None


class _DelayedTask:
    """A task that starts after a delay, unless it is stopped before."""

    __slots__ = ("_task", "_timer")

    def __init__(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(seconds, self._begin, work)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task = asyncio.create_task(work())

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


def _words_of(standing: Standing | None) -> str:
    """The comment that says what a silent stream waits for, as far as that is known."""
    if standing is not None and standing.ahead >= 0:
        return f"waiting {standing.ahead} ahead"
    if standing is not None and standing.read < standing.known - 1:
        return f"reading {standing.read} of {standing.known}"
    return KEEP_ALIVE


class EventStream(Response):
    """Sends the events that a generator makes, and closes the generator whatever happens.

    The generator's last item is sent together with the end of the answer; `form` tells which that is. An
    empty item sends the headers before there is an event. A call raises ClientDisconnect if the client leaves
    before the headers are sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        keep_alive: float = 0.0,
        late_headers: Callable[[], list[tuple[bytes, bytes]]] = list,
        on_flow: Callable[[bool], None] = lambda paused: None,
        form: StreamForm = DONE_FORM,
        standing: Callable[[], Awaitable[Standing | None]] | None = None,
    ) -> None:
        """`late_headers` returns headers that are known when the first event is sent, and not before.

        `on_flow` is told with True that the client does not keep up with reading, and with False that it
        does again. `standing` asks how far a silent stream has come.
        """
        self.status_code = 200
        self.background = None
        self.media_type = form.media_type
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._late_headers = late_headers
        self._on_flow = on_flow
        self._form = form
        self._standing = standing
        self._keep_alive = keep_alive if form.has_comments else 0.0
        """Seconds of silence after which a comment is sent; 0 sends none."""
        self._started = self._ended = False
        self._written = 0.0
        """Time of the last write, on the loop's clock."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._clock = send, asyncio.get_running_loop().time
        self._written = self._clock()
        state: RequestState | None = scope.get(KEY)
        if state is not None and state.follow_reader is not None:
            state.follow_reader(self._on_flow)
        opener = _DelayedTask(OPEN_AFTER, self._fill_silence)
        try:
            with ClientWatch(receive):
                async with aclosing(self._events) as events:
                    async for data in events:
                        await self._write(data, more=not self._form.is_last(data))
        except ClientDisconnect:
            if not self._started:
                raise
        except ApiError as error:
            await self._break_off(error)
        except Exception:
            log.exception("a stream broke off")
            await self._break_off(Internal("Internal server error"))
        finally:
            opener.stop()

    async def _break_off(self, error: ApiError) -> None:
        if not self._started:
            raise error from None  # the answer still can have a status of its own
        await self._write(self._form.error_event(error), more=False)

    async def _fill_silence(self) -> None:
        """Sends the headers when the first event is late, then comments during silences."""
        if not self._started:
            await self._write(b"")
        while self._keep_alive > 0 and not self._ended:
            silence = self._clock() - self._written
            if silence >= self._keep_alive:
                before = self._written
                words = _words_of(None if self._standing is None else await self._standing())
                if self._written == before:
                    quiet = words == KEEP_ALIVE and self._form.ping
                    comment = b"" if quiet else b": %s\n\n" % words.encode()
                    await self._write(comment + self._form.ping)
                silence = 0.0
            await asyncio.sleep(self._keep_alive - silence)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            headers = [*self.raw_headers, *self._late_headers()]
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        self._written, self._ended = self._clock(), not more
        await self._send(
            {
                "type": "http.response.body",
                "body": data if data.isascii() else on_one_line(data),
                "more_body": more,
            }
        )
