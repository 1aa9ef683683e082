"""A connection to a running server: requests, answers, and streams of events.

It blocks, and one thread at a time may use it. It is made of the standard library alone, so that a command
answers before a larger client would have been imported.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from worker.logs import printable

DEFAULT_URL = "http://localhost:8000"
_SECONDS = 3600.0
"""Seconds without a byte after which an answer is given up."""
_REMEDIES = {401: "give its key with --api-key, or in the variable FACET_API_KEY"}


class ServerError(Exception):
    """The server cannot be reached, or refuses; the text is for the user."""


class Unreachable(ServerError):
    """There was no answer, or only a part of one."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def value(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Server:
    """A server at a URL: http, https, or unix:/path/of/its/socket. A path may end with /v1 or not."""

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None, seconds: float = _SECONDS) -> None:
        self.url = url
        self._seconds = seconds
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connect, self._root = _connector(url, seconds)
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def get(self, path: str) -> Any:
        """The JSON that answers a GET. Raises ServerError with the server's reason."""
        return self._value(self.send("GET", path))

    def post(self, path: str, body: object) -> Any:
        return self._value(self.send("POST", path, json.dumps(body).encode()))

    def send(
        self, method: str, path: str, body: bytes | None = None, *, request_id: str | None = None
    ) -> Reply:
        """Any answer, whatever its status. Raises Unreachable. The server is told the id of the request."""
        try:
            response = self._open(method, path, body, {"X-Request-Id": request_id} if request_id else {})
            reply = Reply(response.status, response.headers, response.read())
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(error) from None
        if response.will_close:
            self.close()
        return reply

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """The data of each event, as it arrives. Leaving the iterator ends the request at the server, too."""
        complete = False
        try:
            response = self._open("POST", path, json.dumps(body).encode())
            if response.status != 200:
                self._value(Reply(response.status, response.headers, response.read()))
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line[len(b"data: ") :].strip()
                if data == b"[DONE]":
                    response.read()
                    complete = True
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(_reason(event) or "the server ended the answer with an error")
                yield event
            raise Unreachable(f"{self.url} broke off before the answer was complete")
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            if not complete:
                self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """Ends the request that another thread waits for; there it raises Unreachable."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # it is closed by now
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _open(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] = {}
    ) -> http.client.HTTPResponse:
        if self._connection is not None:
            with suppress(OSError, http.client.HTTPException):  # the server has closed it while it lay idle
                return self._ask(self._connection, method, path, body, headers)
            self.close()
        self._connection = connection = self._connect()
        return self._ask(connection, method, path, body, headers)

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        connection.request(method, self._root + path, body, {**self._headers, **headers})
        return connection.getresponse()

    def _value(self, reply: Reply) -> Any:
        value = reply.value()
        if reply.status != 200:
            reason = _reason(value) or f"answers with status {reply.status}"
            remedy = f"; {_REMEDIES[reply.status]}" if reply.status in _REMEDIES else ""
            raise ServerError(f"{self.url}: {reason}{remedy}")
        if value is None:
            raise ServerError(f"{self.url}: the answer is not JSON; is this the address of an API?")
        return value

    def _unreachable(self, error: Exception) -> Unreachable:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Unreachable(f"{self.url}: {printable(reason)}; start the server, or name another with --url")


def _reason(value: Any) -> str | None:
    """The message in an error's body."""
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return printable(message) if isinstance(message, str) and message else None


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connector(url: str, seconds: float) -> tuple[Callable[[], http.client.HTTPConnection], str]:
    """Returns a function that makes connections, and the path under which the API lies."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        return (lambda: _UnixConnection(path, seconds)), ""
    with suppress(ValueError):  # of brackets without an end, or a port that is no number
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
        root = parts.path.rstrip("/").removesuffix("/v1")
        if parts.scheme == "http" and host:
            return (lambda: http.client.HTTPConnection(host, port or 80, timeout=seconds)), root
        if parts.scheme == "https" and host:
            tls = ssl.create_default_context()
            return (
                lambda: http.client.HTTPSConnection(host, port or 443, timeout=seconds, context=tls)
            ), root
    raise ServerError(f"{url!r} is not the address of a server; write for example {DEFAULT_URL}")
