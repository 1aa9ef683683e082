"""The HTTP protocol byte by byte: every prefix of a request, then silence; and what is too much."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
from fake_connection import EchoApp, FakeClient, FakeServer, settled

from server.http.connection import connection_limits as limits
from server.http.connection.deadline_timer import TICK

GET = b"GET /x?y=z HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n"
HEAD_OF_POST = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n"
POST = HEAD_OF_POST + b"0123456789" * 2
CHUNKED_HEAD = b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = CHUNKED_HEAD + b"5\r\n01234\r\n5;ext=1\r\n56789\r\n0\r\nTrailer: t\r\n\r\n"
REQUESTS = [(GET, len(GET), 0), (POST, len(HEAD_OF_POST), 20), (CHUNKED, len(CHUNKED_HEAD), 10)]


# Whole requests.


@pytest.mark.parametrize(("request_", "head", "length"), REQUESTS)
async def test_a_request_is_answered_however_it_is_cut(
    app: EchoApp, server: FakeServer, request_: bytes, head: int, length: int
) -> None:
    client = server.connect()
    for cut in range(len(request_) + 1):
        client.send(request_[:cut]) if cut else None
        client.send(request_[cut:]) if cut < len(request_) else None
        await settled()
    for byte in request_:
        client.send(bytes([byte]))
    await settled()
    answers = client.answers()
    assert answers == [(200, {"path": "/x", "length": length})] * (len(request_) + 2)
    assert not client.closed
    assert client.seconds_until_closed() == pytest.approx(limits.KEEP_ALIVE_SECONDS, abs=2 * TICK)
    assert len(client.answers()) == len(answers)  # a connection between two requests ends in silence
    await settled()
    assert len(server.deadlines) == 0


@pytest.mark.parametrize(("request_", "head", "length"), REQUESTS)
async def test_every_prefix_then_silence(
    app: EchoApp, server: FakeServer, request_: bytes, head: int, length: int
) -> None:
    for cut in range(len(request_)):
        client = server.connect()
        if cut:
            client.send(request_[:cut])
        await settled()
        seconds = client.seconds_until_closed()
        error = client.error()
        assert error["type"] == "RequestTimeoutError"
        if cut == 0:
            expected = limits.FIRST_BYTE_SECONDS
        elif cut < head:
            expected = limits.HEAD_SECONDS
        else:
            expected = limits.BODY_SECONDS
        assert seconds == pytest.approx(expected, abs=0.01 + 2 * TICK), cut
        await settled()
        assert server.state.connections == set()
    assert app.bodies == []
    assert app.left == len(request_) - head
    assert server.refused == [408] * head
    assert len(server.deadlines) == 0


async def test_a_dripping_head_has_a_deadline_for_the_whole(client: FakeClient) -> None:
    client.server.clock.advance(4)
    for byte in GET[:22]:
        client.send(bytes([byte]))
        client.server.clock.advance(0.45)
    assert not client.closed
    client.server.clock.advance(1)
    assert "headers took more than 10 seconds" in client.error()["message"]


async def test_a_dripping_body_has_a_deadline_for_the_whole(client: FakeClient) -> None:
    client.send(HEAD_OF_POST.replace(b"20", b"163840"))
    for _ in range(78):
        client.send(b"x")
        client.server.clock.advance(0.5)
        await settled()
        assert not client.closed
    client.server.clock.advance(1.5)
    assert "body took more than 30 seconds" in client.error()["message"]


async def test_a_chunked_body_has_more_time_the_more_has_come(app: EchoApp, client: FakeClient) -> None:
    client.send(CHUNKED_HEAD)
    for _ in range(40):
        client.send(b"4000\r\n" + b"x" * 16384 + b"\r\n")
        client.server.clock.advance(1)
        await settled()
    assert not client.closed
    for _ in range(70):
        client.send(b"1\r\nx\r\n")
        client.server.clock.advance(0.5)
        await settled()
    assert client.closed


async def test_the_servers_own_work_has_no_deadline(app: EchoApp, client: FakeClient) -> None:
    app.open.clear()
    client.send(POST)
    await settled()
    client.server.clock.advance(1000)
    app.open.set()
    await settled()
    assert client.answers() == [(200, {"path": "/x", "length": 20})]


async def test_an_idle_connection_that_speaks_again_is_served(client: FakeClient) -> None:
    for _ in range(5):
        client.send(GET)
        await settled()
        client.server.clock.advance(4)
    assert len(client.answers()) == 5


async def test_an_empty_line_after_a_body_begins_no_request(client: FakeClient) -> None:
    client.send(POST + b"\r\n")
    await settled()
    assert client.seconds_until_closed() == pytest.approx(limits.KEEP_ALIVE_SECONDS, abs=2 * TICK)
    assert len(client.answers()) == 1


# Too much.


async def test_a_head_is_refused_before_it_is_parsed(client: FakeClient, monkeypatch: Any) -> None:
    fed = 0
    feed = client.protocol._feed

    def counted(data: bytes) -> None:
        nonlocal fed
        fed += len(data)
        feed(data)

    monkeypatch.setattr(client.protocol, "_feed", counted)
    client.send(b"GET / HTTP/1.1\r\nA: " + b"x" * 1000)
    while not client.closed:
        client.send(b"x" * 250_000)
    assert fed == limits.MAX_HEAD
    assert client.error()["code"] == 431
    assert not client.transport.reading
    client.server.clock.advance(limits.LINGER_SECONDS + 2 * TICK)
    assert client.transport.aborted


@pytest.mark.parametrize("piece", [1, 1000, 1 << 20])
async def test_limits_of_a_head(server: FakeServer, piece: int) -> None:
    def answer(request: bytes) -> FakeClient:
        client = server.connect()
        for start in range(0, len(request), piece):
            client.send(request[start : start + piece])
        return client

    def head(first: bytes, *headers: bytes) -> bytes:
        return b"\r\n".join([first, *headers, b"", b""])

    first = b"GET / HTTP/1.1"
    fitting = [
        head(first, *[b"a: b"] * limits.MAX_HEADERS),
        head(b"GET /" + b"a" * (limits.MAX_TARGET - 1) + b" HTTP/1.1"),
        head(first, b"a: " + b"x" * (limits.MAX_HEAD - len(head(first, b"a: ")) - 1)),
    ]
    for request in fitting:
        client = answer(request)
        await settled()
        assert [status for status, _ in client.answers()] == [200]
        client.transport.close()
        await settled()
    for request, status in [
        (head(first, *[b"a: b"] * (limits.MAX_HEADERS + 1)), 431),
        (b"\r\n".join([first, *[b"a: b"] * (limits.MAX_HEADERS + 3)]), 431),
        (head(b"GET /" + b"a" * limits.MAX_TARGET + b" HTTP/1.1"), 414),
        (b"GET /" + b"a" * 1_000_000, 414),
        (head(first, b"a: " + b"x" * limits.MAX_HEAD), 431),
        (head(first, b"a" * limits.MAX_HEAD + b": x"), 431),
        (b"\r\n" * limits.MAX_HEAD, 431),
    ]:
        client = answer(request)
        await settled()
        assert client.error()["code"] == status
        client.transport.abort()
        await settled()


async def test_an_operator_may_set_other_limits_of_a_head(app: EchoApp) -> None:
    server = FakeServer(app, max_head=2000, max_headers=10, keep_alive=60.0)
    first = b"GET / HTTP/1.1\r\n"
    for head, status in (
        (first + b"a: b\r\n" * 10, 200),
        (first + b"a: b\r\n" * 11, 431),
        (first + b"a: %s\r\n" % (b"x" * 1000), 200),
        (first + b"a: %s\r\n" % (b"x" * 2000), 431),
    ):
        client = server.connect()
        client.send(head + b"\r\n")
        await settled()
        assert [found for found, _ in client.answers()] == [status]
        if status == 431:
            assert "at most 10 headers, and at most 2000 bytes" in client.error()["message"]
        else:
            assert client.seconds_until_closed() == pytest.approx(60.0, abs=2 * TICK)


@pytest.mark.parametrize(
    "request_", [b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"nonsense\r\n\r\n"]
)
async def test_what_is_no_http_is_told_so(client: FakeClient, request_: bytes) -> None:
    client.send(request_)
    assert client.error()["type"] == "BadRequestError"
    assert client.server.refused == [400]


async def test_a_broken_body_is_refused(app: EchoApp, client: FakeClient) -> None:
    client.send(CHUNKED_HEAD + b"5\r\n01234\r\n")
    await settled()
    client.send(b"zz\r\n")
    assert client.error()["code"] == 400
    await settled()
    assert (app.bodies, app.left) == ([], 1)


@pytest.mark.parametrize(
    "endless", [b"5;" + b"x" * 70_000, b"0\r\na: " + b"x" * 70_000, b"0\r\n" + b"a: b\r\n" * 200]
)
async def test_what_is_no_content_of_a_body_is_bounded(
    app: EchoApp, client: FakeClient, endless: bytes
) -> None:
    client.send(CHUNKED_HEAD + b"5\r\n01234\r\n")
    await settled()
    for start in range(0, len(endless), 100):
        client.send(endless[start : start + 100])
    assert client.error()["code"] == 400


async def test_an_answer_before_the_body_ends_gives_the_rest_a_while(
    app: EchoApp, client: FakeClient
) -> None:
    app.early = True
    client.send(HEAD_OF_POST + b"0123")
    await settled()
    assert [status for status, _ in client.answers()] == [200]
    client.server.clock.advance(3)
    client.send(b"0" * 16)
    client.send(HEAD_OF_POST + b"0123")
    await settled()
    assert [status for status, _ in client.answers()] == [200, 200]
    assert client.seconds_until_closed() == pytest.approx(limits.KEEP_ALIVE_SECONDS, abs=2 * TICK)
    assert len(client.answers()) == 2


# Several requests at once.


async def test_a_pipelined_request_has_nothing_of_the_context_of_the_one_before(server: FakeServer) -> None:
    key: ContextVar[str] = ContextVar("key", default="")
    seen: list[str] = []
    echo = server.connect().protocol.app

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        seen.append(key.get())
        key.set("the first one's")
        await echo(scope, receive, send)

    client = server.connect()
    client.protocol.app = noting
    client.send(GET * 2)
    await settled()
    assert seen == ["", ""]


async def test_pipelined_requests_are_answered_in_order(app: EchoApp, client: FakeClient) -> None:
    app.open.clear()
    client.send(POST + CHUNKED + GET + POST[:-3])
    await settled()
    client.server.clock.advance(100)  # the last body is not read before the others are answered
    app.open.set()
    await settled()
    assert [body["length"] for _, body in client.answers()] == [20, 10, 0]
    client.send(POST[-3:])
    await settled()
    assert [body["length"] for _, body in client.answers()] == [20, 10, 0, 20]
    many = POST * 3000
    while many:
        client.send(many[:60_000])
        many = many[60_000:]
        await settled()
    assert client.closed  # more than MAX_PIPELINED at once
    assert len(client.answers()) == 4 + 1 + limits.MAX_PIPELINED


@pytest.mark.parametrize("bad", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 102])
async def test_what_follows_a_good_request_does_not_spoil_its_answer(
    app: EchoApp, client: FakeClient, bad: bytes
) -> None:
    app.open.clear()
    client.send(POST + POST + bad)
    await settled()
    app.open.set()
    await settled()
    assert client.answers() == [(200, {"path": "/x", "length": 20})] * 2
    assert client.closed


async def test_half_a_head_behind_a_long_answer(app: EchoApp, client: FakeClient) -> None:
    app.open.clear()
    client.send(POST + GET[:10])
    await settled()
    client.server.clock.advance(60)
    assert not client.closed
    client.send(GET[10:])
    app.open.set()
    await settled()
    assert client.answers() == [(200, {"path": "/x", "length": 20})]
    assert client.closed


async def test_a_long_body_then_a_head_in_pieces(app: EchoApp, client: FakeClient) -> None:
    """The bytes before a head do not count as the head's."""
    long = HEAD_OF_POST.replace(b"20", b"60000") + b"x" * 60_000
    client.send(long + long[:3])
    client.send(long[3:8])
    client.send(long[8:] + GET + long[:50])
    client.send(long[50:])
    await settled()
    assert [body["length"] for _, body in client.answers()] == [60_000, 60_000, 0, 60_000]


async def test_a_request_for_another_protocol_is_answered_in_this_one(client: FakeClient) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    client.send(GET.replace(b"\r\n\r\n", b"\r\n" + upgrade))
    await settled()
    client.send(POST)
    await settled()
    # As Java's HttpClient sends its first request. The body is no request of its own.
    offering = POST.replace(b"\r\n\r\n", b"\r\n" + upgrade)
    client.send(offering + offering[:-10])
    client.send(offering[-10:] + GET)
    await settled()
    assert [body["length"] for _, body in client.answers()] == [0, 20, 20, 20, 0]
