"""HTTP/1.1 as a load generator needs it: connections that are kept, answers handed on as they arrive.

So little, because what the generator costs is taken from the server when both share a machine: bytes go
through httptools and to the receiver, and nothing else is done with them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import httptools
import msgspec

from server.bench.serve_options import BenchError
from server.terminal.server_client import not_an_address, parsed_address, root_of

Receive = Callable[[bytes], None]
JSON = "application/json"
_EXAMPLE = "http://127.0.0.1:8000"


class TransportError(Exception):
    """No answer, or only a part of one. The text is the kind of the error, the same for all of its kind."""


class Client:
    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        address = parsed_address(url)
        if address is None:
            raise BenchError(not_an_address(url, _EXAMPLE))
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._host, self._port = str(address.hostname), address.port or (443 if self._tls else 80)
        self._root = root_of(address)
        self._timeout = timeout
        self._idle: list[_Connection] = []
        self._headers = f"Host: {address.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n"
        if api_key is not None:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def get(self, path: str) -> tuple[int, bytes]:
        body = bytearray()
        status = await self._send(self._head("GET", path) + b"\r\n", body.extend)
        return status, bytes(body)

    async def post(self, path: str, body: bytes, receive: Receive, kind: str = JSON) -> int:
        """Returns the status, once `receive` has been given the whole answer."""
        about = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self._send(self._head("POST", path) + about.encode() + body, receive)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _head(self, method: str, path: str) -> bytes:
        return f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}".encode()

    async def _send(self, message: bytes, receive: Receive) -> int:
        try:
            async with asyncio.timeout(self._timeout):
                while self._idle:
                    connection = self._idle.pop()
                    try:
                        return await self._exchange(connection, message, receive)
                    except TransportError:
                        if connection.answered:
                            raise
                        # the server had closed it while it lay idle
                return await self._exchange(await self._connect(), message, receive)
        except TimeoutError:
            raise TransportError("timeout") from None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            raise TransportError("connection refused" if refused else "cannot connect") from None
        return connection

    async def _exchange(self, connection: _Connection, message: bytes, receive: Receive) -> int:
        try:
            status = await connection.exchange(message, receive)
        except BaseException:
            connection.close()
            raise
        if connection.open:
            self._idle.append(connection)
        return status


class _Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self.open = False
        self.answered = False
        """Whether anything has come back since the last request went out."""
        self._transport: Any = None
        self._parser: Any = None
        self._receive: Receive = _ignore
        self._status: asyncio.Future[int] | None = None

    async def exchange(self, message: bytes, receive: Receive) -> int:
        self.answered = False
        if not self.open:
            raise TransportError("connection closed")
        self._receive = receive
        self._parser = httptools.HttpResponseParser(self)
        self._status = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            return await self._status
        finally:
            self._status, self._receive = None, _ignore

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.open = True

    def data_received(self, data: bytes) -> None:
        self.answered = True
        if self._status is None:
            self.close()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("the answer is not HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._fail("connection closed")

    # Called by the parser.

    def on_body(self, body: bytes) -> None:
        self._receive(body)

    def on_message_complete(self) -> None:
        self.open = self.open and self._parser.should_keep_alive()
        if self._status is not None and not self._status.done():
            self._status.set_result(self._parser.get_status_code())

    def _fail(self, kind: str) -> None:
        if self._status is not None and not self._status.done():
            self._status.set_exception(TransportError(kind))


def _ignore(body: bytes) -> None:
    """Drops bytes that no request waits for."""


_REMEDIES = {401: "give its key as --api-key", 404: "give the address of its API as --base-url, without /v1"}


class Model(msgspec.Struct):
    """A model that a server lists."""

    id: str
    max_model_len: int | None = None
    """Tokens of its longest sequence; None if the server does not tell."""


class _Models(msgspec.Struct):
    data: list[Model]


async def first_model(client: Client, url: str) -> Model:
    try:
        status, body = await client.get("/v1/models")
    except TransportError as error:
        raise BenchError(f"{url}: {error}; start the server, or name it with --base-url") from None
    if status != 200:
        remedy = _REMEDIES.get(status, "wait, or name one with --model")
        raise BenchError(f"{url} answers {status} when asked for its models; {remedy}")
    try:
        return msgspec.json.decode(body, type=_Models).data[0]
    except (msgspec.DecodeError, IndexError):
        raise BenchError(f"{url} does not list its models; name one with --model") from None
