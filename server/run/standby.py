"""Answers connections while no API process does: /live with 200, and all else with 503 and the reason.

It accepts from the same listening socket as the API processes. Who accepts a connection answers it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress

from engine_core.reason_codes import SENTENCES, Reason
from server.errors import Unavailable
from server.http.connection.connection_limits import as_bytes, json_answer
from server.http.connection.sockets import make_tls_context
from server.options.server_flags import ServerConfig

MAX_HEAD = 64 << 10
"""Bytes of a request that are read before it is answered, whether or not they are the whole head."""
HEAD_SECONDS = 5.0
"""Seconds after which a request is answered whose head is not complete."""
LINGER_SECONDS, MOST_LINGER_SECONDS = 1.0, 30.0
"""Seconds without a byte, and in all, for which the rest of a request is read and dropped after the answer. A
connection that is closed before all is read would be reset, and the client might never see the answer."""
MAX_VISITORS = 1000
"""Connections at the same time. Further ones are answered before they are read."""
RETRY_SECONDS = 5
_PAUSE_SECONDS = 0.1
"""Seconds to wait after no connection could be accepted, because too many descriptors are open."""

_log = logging.getLogger(__name__)


class Standby:
    def __init__(self, listener: socket.socket, config: ServerConfig) -> None:
        """`listener` does not block. It is closed by `finish` only."""
        self.is_open = False
        self._listener = listener
        self._config = config
        self._tls: ssl.SSLContext | None = None
        self._reason: Reason = "draining"
        self._visitors: set[_Visitor] = set()
        self._opening: set[asyncio.Task[object]] = set()

    def open(self, reason: Reason) -> None:
        """Accept connections from now on. Where TLS is wanted and there is no usable certificate, do not."""
        self._reason = reason
        if not self.is_open:
            try:
                self._tls = make_tls_context(self._config.connections)
            except OSError as error:
                _log.error("the certificate cannot be used, and nobody is answered: %s", error)
                return
        self.is_open = True
        self._watch()

    def close(self) -> None:
        """Leave new connections to others."""
        if self.is_open:
            self.is_open = False
            asyncio.get_running_loop().remove_reader(self._listener)

    async def finish(self, seconds: float) -> None:
        """Close the port. Who has connected is answered first, and has so much time to ask and to read."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (self._visitors or self._opening) and loop.time() < until:
            await asyncio.sleep(0.005)
        for visitor in self._visitors:
            visitor.answer()
        self.close()
        self._dismiss()
        self._listener.close()

    def _dismiss(self) -> None:
        """Answer those who have just connected, without waiting for what they ask."""
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    connection.setblocking(False)
                    if self._tls is None:
                        connection.send(self.answer_to(_heard_so_far(connection)))

    def answer_to(self, head: bytes) -> bytes:
        """The answer to a request that begins so."""
        method, target, *_ = *head.partition(b"\r\n")[0].split(b" "), b""
        path = target.partition(b"?")[0].removeprefix(self._config.root_path.encode())
        if path == b"/live":
            answer = json_answer(200, {"state": "live"}, {})
        else:
            error = Unavailable(SENTENCES[self._reason], retry_after=RETRY_SECONDS, reason=self._reason)
            answer = as_bytes(error, path)
        return b"".join(answer.partition(b"\r\n\r\n")[:2]) if method == b"HEAD" else answer

    def enter(self, visitor: _Visitor) -> bool:
        """Count a connection; returns whether there is room to wait for its request."""
        self._visitors.add(visitor)
        return len(self._visitors) <= MAX_VISITORS

    def leave(self, visitor: _Visitor) -> None:
        self._visitors.discard(visitor)

    def _watch(self) -> None:
        if self.is_open:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept all connections that wait. Other processes may have been faster."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("no connection can be accepted: %s", error.strerror)
                loop.remove_reader(self._listener)
                loop.call_later(_PAUSE_SECONDS, self._watch)
                return
            connection.setblocking(False)
            opening = loop.create_task(
                loop.connect_accepted_socket(lambda: _Visitor(self), connection, ssl=self._tls)
            )
            self._opening.add(opening)
            opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()):
            _log.debug("a connection ended before its request: %s", error)


class _Visitor(asyncio.Protocol):
    """One connection: its head is read, then it is answered, and the rest of the request is dropped."""

    def __init__(self, standby: Standby) -> None:
        self._standby = standby
        self._head = bytearray()
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.answer)
        if not self._standby.enter(self):
            self.answer()

    def data_received(self, data: bytes) -> None:
        if self._answered:
            self._linger()
            return
        self._head += data[: MAX_HEAD - len(self._head)]
        if b"\r\n\r\n" in self._head or len(self._head) >= MAX_HEAD:
            self.answer()

    def answer(self) -> None:
        if self._answered:
            return
        self._answered = True
        self._transport.write(self._standby.answer_to(bytes(self._head)))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._until = asyncio.get_running_loop().time() + MOST_LINGER_SECONDS
        self._linger()

    def _linger(self) -> None:
        """Close the connection when nothing has come for a while."""
        loop = asyncio.get_running_loop()
        self._timer.cancel()
        at = min(self._until, loop.time() + LINGER_SECONDS)
        self._timer = loop.call_at(at, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._standby.leave(self)


def _heard_so_far(connection: socket.socket) -> bytes:
    try:
        return connection.recv(MAX_HEAD)
    except BlockingIOError:
        return b""
