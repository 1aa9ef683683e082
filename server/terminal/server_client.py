"""The client of commands that talk to a running server: its flags, requests, answers, streams of events.

It blocks, and one thread at a time may use it. It is made of the standard library alone, so that a command
answers before a larger client would have been imported.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from server.options.parse_server_options import client_key_of_environment
from server.terminal.console import CommandError
from worker.logs import printable

DEFAULT_URL = "http://localhost:8000"
_SECONDS = 3600.0
"""Seconds without a byte after which an answer is given up."""
_REMEDIES = {401: "give its key with --api-key, or in the variable FACET_API_KEY"}


class ServerError(CommandError):
    """The server cannot be reached, or refuses."""


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


class ServerClient:
    """A server at a URL: http, https, or unix:/path/of/its/socket. A path may end with /v1 or not."""

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        self.url = url
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if api_key:
            if not api_key.isprintable():
                raise ServerError("the API key has a line's end or another character that no header may have")
            self._headers["Authorization"] = f"Bearer {api_key}".encode()
        self._address = None if url.startswith("unix:") else parsed_address(url)
        if self._address is None and not url.startswith("unix:"):
            raise ServerError(not_an_address(url, DEFAULT_URL))
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> ServerClient:
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
            response = self._open("POST", path, json.dumps(body).encode(), {})
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
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        root = "" if self._address is None else root_of(self._address)
        request = (method, root + path, body, {**self._headers, **headers})
        if self._connection is not None:
            with suppress(OSError, http.client.HTTPException):  # the server has closed it while it lay idle
                self._connection.request(*request)
                return self._connection.getresponse()
            self.close()
        self._connection = connection = self._connect()
        connection.connect()
        with suppress(BrokenPipeError, ConnectionResetError):  # a long body may be refused before its end
            connection.request(*request)
        return connection.getresponse()

    def _connect(self) -> http.client.HTTPConnection:
        address = self._address
        if address is None:
            return _UnixConnection(self.url.removeprefix("unix:"))
        host = str(address.hostname)
        if address.scheme == "http":
            return http.client.HTTPConnection(host, address.port or 80, timeout=_SECONDS)
        tls = ssl.create_default_context()
        return http.client.HTTPSConnection(host, address.port or 443, timeout=_SECONDS, context=tls)

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
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


# Addresses of servers.


def parsed_address(url: str) -> SplitResult | None:
    """The parts of a URL of http or https, or of one without a scheme; None if it is no such address."""
    with suppress(ValueError):  # of brackets without an end, or a port that is no number
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    return None


def root_of(address: SplitResult) -> str:
    """The path under which the API lies."""
    return address.path.rstrip("/").removesuffix("/v1")


def not_an_address(url: str, example: str) -> str:
    return f"{url!r} is not the address of a server; write for example {example}"


# Flags of all commands that talk to a server; their names are those of `vllm chat`.


def add_server_flags(
    parser: argparse.ArgumentParser, *, model: bool = True, default: str | None = DEFAULT_URL
) -> None:
    """Adds the flags. `default` is the server without --url; None if the command does without one then."""
    about = f"The server{f' ({default})' if default else ''}; unix:PATH, too."
    parser.add_argument("--url", default=default, metavar="URL", help=about)
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="The API key; safer in FACET_API_KEY, VLLM_API_KEY or OPENAI_API_KEY.",
    )
    if model:
        parser.add_argument(
            "--model-name", "--model", dest="model", metavar="NAME", help="Default: the first it lists."
        )


def client_of(given: argparse.Namespace) -> ServerClient:
    return ServerClient(given.url, given.api_key or client_key_of_environment())


def model_of(server: ServerClient, given: argparse.Namespace, task: str) -> str:
    """The name of the model whose card `card_of` returns."""
    return card_of(server, given, task)["id"]


def card_of(server: ServerClient, given: argparse.Namespace, task: str) -> dict[str, Any]:
    """What the server tells of the model that was asked for, or of its first. Raises ServerError if that
    cannot do the task."""
    cards = server.get("/v1/models").get("data", [])
    card = next((card for card in cards if given.model in (None, card["id"])), None)
    if card is None:
        names = ", ".join(card["id"] for card in cards) or "none"
        raise ServerError(f"{server.url} has no model {given.model}; it has {names}")
    tasks = card.get("tasks")
    if tasks and task not in tasks:  # empty: it is one of several, and nothing is known of it yet
        raise ServerError(f"{card['id']} cannot {task}; it can {', '.join(tasks)}")
    return card
