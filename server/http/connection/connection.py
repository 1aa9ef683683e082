"""uvicorn's HTTP protocol, with bounds on what a client sends and on how long everything may take.

Bytes are counted before they are parsed, because httptools puts a head together piece by piece, however long
it becomes. What is refused here is answered in the shape of all our errors, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import Any, Literal, cast

import httptools
from starlette.requests import ClientDisconnect
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from server.access.request_state import state_of
from server.errors import ApiError
from server.http.connection import connection_limits as limits
from server.http.connection.deadline_timer import NEVER
from server.http.connection.shared_limits import Shared
from server.http.connection.sockets import bytes_taken, unread_bytes

Wait = Literal[
    "nothing", "first byte", "head", "body", "rest of body", "next request", "reader", "to be closed"
]
"""What a deadline is for. "nothing" is while the server itself works, or answers an earlier request; "rest of
body" the end of a body whose request is answered already; "reader" the client, to take more of what waits for
it; "to be closed" the client, to fetch a refusal."""


class Connection(HttpToolsProtocol):
    """One client's connection."""

    due = NEVER
    _waits_for: Wait = "nothing"
    _ends = False
    """Whether nothing more is read."""
    _in_head = True
    """Whether the next bytes belong to a head: no body is incomplete."""
    _head = 0
    """Bytes of the incomplete head so far."""
    _framing = 0
    """Bytes of the incomplete body since its last content."""
    _has_length = False
    """Whether the head has told the length of the body."""
    _complete: object = None
    """The scope of the last complete request."""
    _fault: ApiError | None = None
    """The reason why a callback has stopped the parser."""
    _next_waits = False
    """Whether the next request is begun only when the client has taken more of the last answer."""
    _streams = False
    """Whether an answer on this connection is or was a stream."""
    _on_flow: Callable[[bool], None] | None = None
    """A function that is told whether the reader of the stream that is written does not keep up."""
    _taken = 0
    """The bytes that the reader had taken when its deadline was set."""
    _silences = 0
    """How many deadlines of the reader have passed since it took any."""

    def __init__(
        self,
        shared: Shared,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.url, self.headers = b"", []
        self.access_logger = cast(Any, shared.access_log)
        self._shared = shared
        self._timer = shared.timer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(limits.MAX_PENDING)
        self._is_proxy = self._shared.proxies.trusts(self.client[0] if self.client else None)
        self._wait("first byte", limits.FIRST_BYTE_SECONDS)
        if len(self.connections) > self._shared.most:
            self._take_reserved()

    def _take_reserved(self) -> None:
        """Make this one of the connections for probes. If there are as many as may be, one is refused."""
        reserved = self._shared.reserved
        reserved[self] = None
        if len(reserved) > limits.RESERVED:
            silent = next(each for each in reserved if each.cycle is None)
            silent._refuse(limits.too_many_connections(self._shared.most))

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.reserved.pop(self, None)
        self._timer.forget(self)
        super().connection_lost(exc)

    # What comes in.

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head + len(data) > self._shared.max_head:
            self._feed_piecewise(memoryview(data))
        elif not self._ends:
            self._feed(data)
        if not self._ends:
            self._settle()

    def _feed_piecewise(self, rest: memoryview) -> None:
        """Gives the parser no more of a head than it may have."""
        while rest and not self._ends:
            room = self._shared.max_head - self._head if self._in_head else len(rest)
            self._feed(rest[:room])
            rest = rest[room:]

    def _feed(self, data: bytes | memoryview) -> None:
        complete = self._complete
        self._framing += len(data)
        try:
            self.parser.feed_data(data)  # pyright: ignore[reportOptionalMemberAccess]
        except httptools.HttpParserUpgrade as offer:
            # The parser skips the body of a request that offers another protocol. It reads this one again as
            # if it had not.
            return self._feed(self._head_without_offer() + bytes(data[offer.args[0] :]))
        except httptools.HttpParserError:
            self._refuse(self._fault or limits.MALFORMED)
            return
        if not self._in_head:
            if self._framing > limits.MAX_FRAMING or len(self.headers) > self._shared.max_headers:
                self._refuse(limits.FRAMING_TOO_LARGE)
            return
        # Where in these bytes a head begins that comes after a complete request is not known.
        self._head = self._head + len(data) if self._complete is complete else 0
        if fault := self._excess():
            self._refuse(fault)

    def _head_without_offer(self) -> bytes:
        """The head that was read last, without its header Upgrade."""
        parser = cast(Any, self.parser)
        line = b"%s %s HTTP/%s" % (parser.get_method(), self.url, parser.get_http_version().encode())
        headers = [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join([line, *headers, b"", b""])

    def _offers(self) -> bool:
        """Whether the head that was read last asks for another protocol, and so will be read again."""
        parser = cast(Any, self.parser)
        return parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def _excess(self) -> ApiError | None:
        """Why the head that is being read is refused, if it is too large."""
        if len(self.url) > limits.MAX_TARGET:
            return limits.TARGET_TOO_LONG
        most, headers = self._shared.max_head, self._shared.max_headers
        if self._head >= most or len(self.headers) > headers:
            return limits.head_too_large(most, headers)
        return None

    def on_headers_complete(self) -> None:
        if self._offers():
            return
        self._fault = self._excess()
        self.url = self._shared.below_root(self.url)
        if len(self.pipeline) >= limits.MAX_PIPELINED:
            self._fault = limits.TOO_MANY_PIPELINED
        if self._is_proxy:
            self._shared.proxies.identify(cast(Any, self.scope))
        if self._fault is None and self in self._shared.reserved:
            self._fault = self._check_reserved()
        if self._fault is None and (self.cycle is None or self.cycle.response_complete):
            method = self.parser.get_method()  # pyright: ignore[reportOptionalMemberAccess]
            self._fault = self._shared.check_head(method, self.url, self.scope)
        if self._fault is not None:
            raise ValueError(self._fault.message)  # stops the parser
        super().on_headers_complete()
        if self in self._shared.reserved:
            self.cycle.keep_alive = False
        self._in_head = False
        self._head = self._framing = 0
        state_of(cast(Any, self.scope)).follow_reader = self._follow_reader

    def _check_reserved(self) -> ApiError | None:
        """Why a request is refused that came when all connections were taken, unless one is free by now."""
        most, reserved = self._shared.most, self._shared.reserved
        if self.url.partition(b"?")[0] in limits.PROBE_PATHS:
            return None
        if len(self.connections) - len(reserved) >= most:
            return limits.too_many_connections(most)
        del reserved[self]
        return None

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        if self._waits_for == "body" and not self._has_length:
            self.due += len(body) / limits.BODY_RATE
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers():
            return
        super().on_message_complete()
        self._in_head = True
        self._complete = self.scope

    # What goes out.

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._on_flow = None
        if self.transport.is_closing():
            if self.scheme == "https" or self.transport.get_write_buffer_size():
                self._wait_for_reader()
        elif self.flow.write_paused:
            self._next_waits = True
            self.flow.pause_reading()
        else:
            self._begin_next()

    def _begin_next(self) -> None:
        """Goes on with the next request, as uvicorn does, but without a timer for each."""
        self._next_waits = False
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            # This runs in the task of the request before, of whose context nothing is for the next.
            task = self.loop.create_task(cycle.run_asgi(app), context=Context())
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        self._settle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()
        if self._on_flow is not None:
            self._on_flow(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._on_flow is not None:
            self._on_flow(False)
        if self._waits_for == "reader" and not self.transport.is_closing():
            self._wait_for_nothing()
            if self._next_waits:
                self._begin_next()
            else:
                self._settle()

    def _follow_reader(self, on_flow: Callable[[bool], None]) -> None:
        """Tells the stream that begins now when its client does not keep up with reading, or does again.

        Raises ClientDisconnect if the client has left.
        """
        if self.transport.is_closing():
            raise ClientDisconnect
        self._on_flow = on_flow
        if not self._streams:
            self._streams = True
            # What waits for this reader is bounded more closely.
            self.transport.set_write_buffer_limits(limits.MAX_PENDING_OF_STREAM)
            client = self.transport.get_extra_info("socket")
            if hasattr(socket, "TCP_NOTSENT_LOWAT") and client is not None:
                with suppress(OSError):  # it is a Unix socket
                    client.setsockopt(
                        socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, limits.MAX_UNSENT_OF_STREAM
                    )

    # DeadlineTimer.

    def _settle(self) -> None:
        """Sets the deadline of what is waited for now, unless that was waited for before."""
        if self._ends or self.flow.write_paused:
            return
        cycle = self.cycle
        if not self._in_head:
            if self.pipeline:
                self._wait_for_nothing()
            elif cycle.response_complete:
                self._wait("rest of body", limits.KEEP_ALIVE_SECONDS)
            elif self._waits_for != "body":
                self._wait("body", limits.BODY_SECONDS + self._body_length() / limits.BODY_RATE)
        elif self.scope is not self._complete:
            self._wait("head", limits.HEAD_SECONDS)
        elif cycle is not None:
            if cycle.response_complete:
                self._wait("next request", self._shared.keep_alive)
            else:
                self._wait_for_nothing()

    def _body_length(self) -> int:
        """The length that the head tells. Without one, each piece of the body moves its deadline."""
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        self._has_length = bool(lengths)
        return lengths[0] if lengths else 0

    def _wait(self, what: Wait, seconds: float) -> None:
        if self._waits_for != what:
            self._waits_for = what
            self._timer.set(self, seconds)

    def _wait_for_nothing(self) -> None:
        self._waits_for = "nothing"
        self.due = NEVER

    def _wait_for_reader(self) -> None:
        self._taken, self._silences = bytes_taken(self.transport), 0
        self._waits_for = "reader"
        self._timer.set(self, limits.READER_SECONDS)

    def expire(self) -> None:
        match self._waits_for:
            case "first byte":
                self._refuse(limits.LATE_FIRST_BYTE)
            case "head":
                self._refuse(limits.LATE_HEAD)
            case "body":
                self._refuse(limits.LATE_BODY)
            case "reader":
                self._check_reader()
            case "to be closed":
                self.transport.abort()
            case _ if unread_bytes(self.transport):
                self._wait_for_reader()
            case _:
                self.transport.close()
                self._wait("to be closed", limits.LINGER_SECONDS)

    def _check_reader(self) -> None:
        """Ends the connection if its client takes nothing of what waits for it."""
        unread = unread_bytes(self.transport)
        self._silences += 1
        if not unread and self.transport.is_closing():
            self.transport.abort()  # its client does not end TLS
        elif not unread and not self.flow.write_paused:
            self._wait_for_nothing()
            self._settle()
        elif bytes_taken(self.transport) != self._taken:
            self._wait_for_reader()
        elif unread > limits.MUCH or self._silences == limits.MOST_SILENCES:
            text = "%s:%d - connection ended; its client reads nothing, and %d bytes wait for it"
            logging.getLogger("uvicorn.access").info(text, *(self.client or ("unix", 0)), unread)
            self.transport.abort()
        else:
            self._timer.set(self, limits.READER_SECONDS)

    # Refusals.

    def _refuse(self, error: ApiError) -> None:
        """Answers the request that is being read with an error, and closes the connection."""
        self._ends = True
        cycle = self.cycle
        if self._in_head and cycle is not None and not cycle.response_complete:
            cycle.keep_alive = False  # the connection ends with the last answer to an earlier request
            if not self.flow.write_paused:
                self._wait_for_nothing()
        elif self._in_head:
            self._answer(error, lingers=error.status != 408)
            self._shared.on_refusal(error.status)
        else:
            self._refuse_body(error)

    def _refuse_body(self, error: ApiError) -> None:
        cycle = self.cycle
        if self.pipeline or cycle.response_started:
            self.transport.close()  # bytes written now would be read as part of another answer
            self._wait_for_reader()
        else:
            self._answer(error, lingers=error.status != 408)
        cycle.disconnected = True
        cycle.message_event.set()

    def _answer(self, error: ApiError, *, lingers: bool) -> None:
        """Sends a refusal and closes; if `lingers`, so that a client that still sends can read it.

        Of a crowd only some connections linger.
        """
        self._ends = True
        self._shared.reserved.pop(self, None)
        beyond = len(self.connections) - self._shared.most - len(self._shared.reserved)
        lingers = lingers and beyond <= limits.MOST_LINGERING
        self._shared.log.tell(self.client, error.status, error.message)
        self.transport.write(limits.as_bytes(error, self.url, tuple(self.server_state.default_headers)))
        if not lingers:
            self.transport.close()
        else:
            self.flow.pause_reading()
            if self.transport.can_write_eof():  # TLS cannot
                self.transport.write_eof()
        self._wait("to be closed", limits.LINGER_SECONDS)
