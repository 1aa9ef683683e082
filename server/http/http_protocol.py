"""uvicorn's HTTP, but for one thing: the head of an answer goes out together with the first of its body.

uvicorn writes each ASGI message as it comes, and a write is a system call and wakes the client. That the head
waits for the body's first message, even an empty one, is what ASGI asks of a server.
"""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class HttpProtocol(HttpToolsProtocol):
    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # whose answer has no body to wait for
            self.cycle.transport = cast("asyncio.Transport", HeadHolder(self.transport))


class HeadHolder:
    """The connection, as one answer sees it."""

    __slots__ = ("_head", "_transport", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self.is_closing = transport.is_closing
        self.write = self._keep

    def _keep(self, head: bytes) -> None:
        if head.startswith(b"HTTP/1.1 100 "):  # asks for the body of the request: no answer yet
            self._transport.write(head)
        else:
            self._head = head
            self.write = self._join

    def _join(self, body: bytes) -> None:
        self.write = self._transport.write
        self.write(self._head + body)

    def close(self) -> None:
        if self.write == self._join:  # what was begun is not kept back
            self._join(b"")
        self._transport.close()
