"""A connection of the HTTP server without a socket: its transport and its clock are the test's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from server.http.connection.connection import Connection
from server.http.connection.deadline_timer import TICK, DeadlineTimer
from server.http.connection.refusal_log import RefusalLog
from server.http.connection.shared_limits import Shared


class FakeClock:
    """The time of an event loop, and what is to be called at some time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, call))

    def advance(self, seconds: float) -> None:
        """Lets time pass in small pieces, and calls what is due."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK / 2)
            due = [timer for timer in self.timers if timer[0] <= self.now]
            for timer in due:
                self.timers.remove(timer)
                timer[1]()


class FakeTransport:
    """A transport that keeps what is written. Its client reads at once, unless `client_reads` is False."""

    def __init__(self) -> None:
        self.sent = b""
        self.client_reads = True
        self.reading = True
        self.unfetched: list[bytes] = []
        """Bytes that the client has sent while the server did not read."""
        self.closing = self.aborted = self.half_closed = self.lost = False
        self.protocol: Any = None
        self.unread = 0
        self.high = 64 << 10

    def write(self, data: bytes) -> None:
        self.sent += data
        if not self.client_reads:
            self.unread += len(data)
            if self.unread > self.high and not self.protocol.flow.write_paused:
                self.protocol.pause_writing()

    def take(self, size: int) -> None:
        """The client takes so many bytes."""
        self.unread -= size
        if self.unread <= self.high // 4 and self.protocol.flow.write_paused:
            self.protocol.resume_writing()
        if self.closing and not self.unread:
            self._lose(None)

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            if not self.unread:
                self._lose(None)

    def abort(self) -> None:
        self.closing = self.aborted = True
        self._lose(None)

    def leave(self) -> None:
        """The client closes the connection."""
        self.closing = True
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        self.lost = True
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.half_closed = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        asyncio.get_running_loop().call_soon(self._fetch)

    def receive(self, data: bytes) -> None:
        self.unfetched.append(data)
        self._fetch()

    def _fetch(self) -> None:
        while self.unfetched and self.reading and not self.closing:
            self.protocol.data_received(self.unfetched.pop(0))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def set_write_buffer_limits(self, high: int) -> None:
        if self.lost:
            raise RuntimeError("unable to perform operation; the handler is closed")  # as uvloop does
        self.high = high

    def get_extra_info(self, name: str) -> Any:
        return {"peername": ("10.0.0.1", 5), "sockname": ("10.0.0.2", 80)}.get(name)


class FakeServer:
    """A server whose connections are all fake, at `clock`."""

    def __init__(self, app: ASGIApp, most: int = 100, **options: Any) -> None:
        self.clock = FakeClock()
        self.deadlines = DeadlineTimer(self.clock.time, self.clock.call_later)
        self.refused: list[int] = []
        self.state = ServerState()
        log = RefusalLog(self.clock.call_later)
        self._shared = Shared(most, self.deadlines, log, self.refused.append, **options)
        self._config = Config(app, http=cast(Any, Connection), ws="none", lifespan="off", log_config=None)
        self._config.load()

    def connect(self) -> FakeClient:
        transport = FakeTransport()
        protocol = Connection(self._shared, self._config, self.state, {}, asyncio.get_running_loop())
        transport.protocol = protocol
        protocol.connection_made(cast(Any, transport))
        return FakeClient(self, protocol, transport)


class FakeClient:
    def __init__(self, server: FakeServer, protocol: Connection, transport: FakeTransport) -> None:
        self.server = server
        self.protocol = protocol
        self.transport = transport

    def send(self, data: bytes) -> None:
        """Sends bytes, which the server gets when it reads."""
        self.transport.receive(data)

    @property
    def closed(self) -> bool:
        """Whether the server has said all that it will say."""
        return self.transport.closing or self.transport.half_closed

    def answers(self) -> list[tuple[int, Any]]:
        """The status and JSON of each answer so far."""
        found: list[tuple[int, Any]] = []
        rest = self.transport.sent
        while rest:
            head, rest = rest.split(b"\r\n\r\n", 1)
            [length] = [
                int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")
            ]
            found.append((int(head.split()[1]), json.loads(rest[:length])))
            rest = rest[length:]
        return found

    def error(self) -> dict[str, Any]:
        """The one answer so far, which must be an error in our shape that closes the connection."""
        [(status, body)] = self.answers()
        error = body["error"]
        if set(error) != {"message", "type", "param", "code"} or error["code"] != status:
            raise ValueError(f"not the shape of our errors: {body}")
        for header in (b"connection: close", b"content-type: application/json"):
            if b"\r\n%s\r\n" % header not in self.transport.sent:
                raise ValueError(f"without {header!r}: {self.transport.sent!r}")
        if not self.closed:
            raise ValueError("the connection stays open")
        return error

    def seconds_until_closed(self, most: float = 200.0) -> float:
        """Lets time pass until the server closes the connection; returns how much."""
        clock = self.server.clock
        began = clock.now
        while not self.closed:
            if clock.now - began > most:
                raise TimeoutError(f"not closed after {most} seconds")
            clock.advance(TICK)
        return clock.now - began


async def settled() -> None:
    """Lets all tasks run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


class EchoApp:
    """Answers with the length of the body; waits for `open` before it does."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.bodies: list[bytes] = []
        self.left = 0
        """Requests whose connection ended before their body."""
        self.early = False
        """Whether to answer before the body."""
        self.reply = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", not self.early
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        await self.open.wait()
        data = self.reply or json.dumps({"path": scope["path"], "length": len(body)}).encode()
        headers = [(b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})
