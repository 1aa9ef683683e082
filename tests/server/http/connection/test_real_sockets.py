"""Connections over real sockets and the event loop that serves: plain, with TLS, and on a Unix socket."""

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from certificates import make_certificate
from fake_connection import EchoApp
from live import PATIENCE, wait_until

from server.http.connection import connection_limits as limits
from server.http.connection import sockets
from server.http.connection.connection import Connection
from server.http.connection.deadline_timer import DeadlineTimer
from server.http.connection.refusal_log import RefusalLog
from server.http.connection.shared_limits import Shared

pytestmark = pytest.mark.slow(2)

GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LONG = 16 << 20
"""Bytes that no socket takes by itself."""

Connect = Callable[[], socket.socket]
PATIENT = ("FIRST_BYTE_SECONDS", "HEAD_SECONDS", "READER_SECONDS")


@pytest.fixture
def hurried(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the server wait for nobody for long."""
    for name in PATIENT:
        monkeypatch.setattr(limits, name, 0.3)


@pytest.fixture(params=["tcp", "unix", "tls"])
def connect(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Connect]:
    """A server that soon closes connections which nobody uses; what is yielded connects to it."""
    monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 0.3)
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.1)
    for name in PATIENT:
        monkeypatch.setattr(limits, name, 60.0)
    listener = socket.socket(socket.AF_UNIX if request.param == "unix" else socket.AF_INET)
    sockets.set_options(listener)
    listener.bind(str(tmp_path / "s") if request.param == "unix" else ("127.0.0.1", 0))
    listener.listen()
    options: dict[str, Any] = {}
    tls = ssl.create_default_context()
    if request.param == "tls":
        key, certificate = make_certificate(tmp_path)
        options = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE

    def connected() -> socket.socket:
        client = socket.socket(listener.family)
        client.settimeout(60)
        client.connect(address)
        return tls.wrap_socket(client) if request.param == "tls" else client

    address = listener.getsockname()
    with _serving(listener, options):
        yield connected


class _serving:
    """A server of an `EchoApp` in a thread of its own, for at most four connections."""

    def __init__(self, listener: socket.socket, options: dict[str, Any]) -> None:
        self._listener = listener
        self._options = options
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))

    async def _run(self) -> None:
        app = EchoApp()
        app.reply = b'"%s"' % bytes(LONG)
        loop = asyncio.get_running_loop()
        timer = DeadlineTimer(loop.time, loop.call_later)
        shared = Shared(4, timer, RefusalLog(loop.call_later), lambda status: None)
        protocol = cast(Any, partial(Connection, shared))
        config = uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", log_config=None, **self._options
        )
        self._server = uvicorn.Server(config)
        await self._server.serve([self._listener])

    def __enter__(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server is not None and self._server.started, 10)

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join()


def read(client: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    data = bytearray()
    with suppress(ConnectionError, ssl.SSLError):
        while piece := client.recv(1 << 16):
            data += piece
    client.close()
    return bytes(data)


def error_of(client: socket.socket) -> int:
    """The status of an answer, which must be an error in our shape."""
    head, _, body = read(client).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert json.loads(body)["error"]["code"] == status
    return status


@pytest.mark.usefixtures("hurried")
def test_half_a_request_and_none(connect: Connect) -> None:
    silent, half = connect(), connect()
    half.sendall(GET[:20])
    began = time.monotonic()
    assert (error_of(silent), error_of(half)) == (408, 408)
    assert 0.2 < time.monotonic() - began < 3 * PATIENCE


def test_a_flood_of_headers_is_stopped_soon(connect: Connect) -> None:
    client = connect()
    client.settimeout(20)
    client.sendall(b"GET / HTTP/1.1\r\nA: ")
    sent = 0
    with pytest.raises((ConnectionError, ssl.SSLError)):
        while sent < LONG:  # beyond what the server reads, the systems of both sides hold some
            client.sendall(b"x" * (1 << 16))
            sent += 1 << 16
    if not isinstance(client, ssl.SSLSocket):  # TLS reads no answer after an error of its own
        assert error_of(client) == 431
    client.close()


def test_a_crowd_is_told_and_the_next_are_served(connect: Connect) -> None:
    served = [connect() for _ in range(4)]
    for path, status in ((b"/live", b"200"), (b"/x", b"503")):
        beyond = connect()
        beyond.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        assert read(beyond).startswith(b"HTTP/1.1 " + status)
    for one in served:
        one.close()

    def is_served() -> bool:
        client = connect()
        client.sendall(GET)
        first = client.recv(12)
        client.close()
        return first == b"HTTP/1.1 200"

    wait_until(is_served, 5)


def test_an_answer_is_read_whole(connect: Connect) -> None:
    client = connect()
    client.sendall(GET)
    assert len(read(client).partition(b"\r\n\r\n")[2]) == LONG + 2


@pytest.mark.turns
@pytest.mark.usefixtures("hurried")
def test_a_reader_that_takes_nothing_is_given_up(connect: Connect) -> None:
    client = connect()
    client.sendall(GET)
    for _ in range(3):  # which takes longer than the reader has
        assert error_of(connect()) == 408
    assert len(read(client)) < LONG
