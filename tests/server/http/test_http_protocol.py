"""What an answer takes from the connection: as few writes as can be, and none that comes late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from server.http.http_protocol import HttpProtocol

HEAD: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Connection(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def answered(messages: Iterable[dict[str, Any]], request: str, requests: int = 1) -> Connection:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            await receive()
        for message in messages:
            await send(message)

    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    config.load()
    connection = Connection()
    protocol = HttpProtocol(config, ServerState(), {})
    protocol.connection_made(connection)
    protocol.data_received(request.encode() * requests)
    for _ in range(10):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    return connection


GET = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def test_a_short_answer_is_one_write() -> None:
    [written] = (await answered([HEAD, body(b"all")], GET)).writes
    assert written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert written.endswith(b"\r\n\r\n3\r\nall\r\n0\r\n\r\n")


async def test_what_follows_goes_out_as_it_comes() -> None:
    pieces = [HEAD, body(b"one", more=True), body(b"two", more=True), body(b"three")]
    first, *rest = (await answered(pieces, GET)).writes
    assert first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert rest == [b"3\r\ntwo\r\n", b"5\r\nthree\r\n0\r\n\r\n"]


async def test_an_empty_message_sends_the_head() -> None:
    [head] = (await answered([HEAD, body(b"", more=True)], GET)).writes
    assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_an_answer_without_a_body_is_sent(method: str, status: int) -> None:
    answer = [{**HEAD, "status": status, "headers": [(b"content-length", b"0")]}, body(b"")]
    connection = await answered(answer, GET.replace("GET", method), requests=2)
    heads = b"".join(connection.writes).split(b"\r\n\r\n")
    assert [one[:12] for one in heads] == [b"HTTP/1.1 %d" % status] * 2 + [b""]


async def test_each_answer_of_a_connection_has_its_own_head() -> None:
    connection = await answered([HEAD, body(b"all")], GET, requests=3)
    assert [one[:15] for one in connection.writes] == [b"HTTP/1.1 200 OK"] * 3


async def test_the_request_is_asked_for_its_body_at_once() -> None:
    asking = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    connection = await answered([HEAD, body(b"all")], asking)
    assert connection.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    whole = await answered([HEAD, body(b"all")], asking + "hi")
    assert [one.partition(b"\r\n")[0] for one in whole.writes][-1] == b"HTTP/1.1 200 OK"


async def test_an_answer_that_breaks_off_after_its_head(caplog: pytest.LogCaptureFixture) -> None:
    connection = await answered([HEAD], GET)
    [head] = connection.writes
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert connection.closed
    assert "without completing response" in caplog.text
