"""More clients than are served, and clients that do not read their answers."""

from typing import Any

import pytest
from fake_connection import EchoApp, FakeClient, FakeServer, settled
from starlette.requests import ClientDisconnect

from server.access.request_state import state_of
from server.http.connection import connection_limits as limits
from server.http.connection.deadline_timer import TICK

GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n"


# Too many.


async def test_requests_beyond_the_most_connections_are_refused(app: EchoApp, server: FakeServer) -> None:
    first, *_ = [server.connect() for _ in range(3)]
    beyond = server.connect()
    beyond.send(GET)
    error = beyond.error()
    assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
    assert b"\r\nretry-after: 1\r\n" in beyond.transport.sent
    assert server.refused == [503]
    late = server.connect()
    first.transport.close()
    beyond.transport.close()
    await settled()
    late.send(GET)  # a connection is free by now
    await settled()
    assert [status for status, _ in late.answers()] == [200]
    assert not late.closed


async def test_probes_are_answered_while_all_connections_are_taken(app: EchoApp, server: FakeServer) -> None:
    app.open.clear()
    for _ in range(3):
        server.connect().send(GET)
    idle = [server.connect() for _ in range(2 * limits.RESERVED)]
    refused = [each for each in idle if each.transport.sent]
    assert refused == idle[: limits.RESERVED]  # the oldest make room for those that come
    app.open.set()
    probes = [server.connect() for _ in range(4)]
    for probe, path in zip(probes, (b"/live", b"/ready?x=1", b"/metrics", b"/livelier"), strict=True):
        probe.send(GET.replace(b"/x", path))
    await settled()
    assert [probe.answers()[0][0] for probe in probes] == [200, 200, 200, 503]
    assert all(probe.closed for probe in probes)


async def test_a_probe_that_is_answered_does_not_give_way(app: EchoApp, server: FakeServer) -> None:
    app.open.clear()
    for _ in range(3):
        server.connect()
    probes = [server.connect() for _ in range(limits.RESERVED)]
    for probe in probes:
        probe.send(GET.replace(b"/x", b"/live"))
    await settled()
    assert server.connect().error()["code"] == 503
    app.open.set()
    await settled()
    assert [probe.answers()[0][0] for probe in probes] == [200] * limits.RESERVED


async def test_a_crowd_that_is_refused_does_not_linger(server: FakeServer) -> None:
    clients = [server.connect() for _ in range(3 + 2 * limits.MOST_LINGERING)]
    for client in clients[3:]:
        client.send(GET)
    lingering = [client for client in clients[3:] if not client.transport.closing]
    assert len(lingering) == limits.MOST_LINGERING
    server.clock.advance(limits.LINGER_SECONDS + 2 * TICK)
    assert all(client.transport.aborted for client in lingering)


# Clients that leave.


async def test_a_client_that_leaves_before_its_stream_begins_ends_it(
    server: FakeServer, app: EchoApp, caplog: pytest.LogCaptureFixture
) -> None:
    client, begun = server.connect(), []

    async def app_of_a_stream(scope: Any, receive: Any, send: Any) -> None:
        await app.open.wait()
        with pytest.raises(ClientDisconnect):
            state_of(scope).follow_reader(begun.append)  # pyright: ignore[reportOptionalCall]

    app.open.clear()
    client.protocol.app = app_of_a_stream
    client.send(GET)
    await settled()
    client.transport.leave()
    await settled()
    app.open.set()
    await settled()
    assert not caplog.messages


# Clients that do not read.


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (300_000, limits.READER_SECONDS),
        (200_000, limits.READER_SECONDS * limits.MOST_SILENCES),
    ],
)
async def test_a_reader_that_takes_nothing_is_given_up(
    app: EchoApp, client: FakeClient, size: int, seconds: float
) -> None:
    app.reply = b'"%s"' % (b"x" * size)
    client.transport.client_reads = False
    client.send(GET)
    await settled()
    client.server.clock.advance(seconds - 1)
    client.transport.take(1)
    client.server.clock.advance(seconds)
    assert not client.transport.aborted  # it has taken a byte
    client.server.clock.advance(limits.READER_SECONDS + 2)
    assert client.transport.aborted


@pytest.mark.parametrize("asks_to_close", [False, True])
async def test_a_slow_reader_gets_everything(app: EchoApp, client: FakeClient, asks_to_close: bool) -> None:
    app.reply = b'"%s"' % (b"x" * 200_000)
    client.transport.client_reads = False
    client.send(GET.replace(b"Accept: */*", b"Connection: close") if asks_to_close else GET)
    await settled()
    while client.transport.unread:
        client.server.clock.advance(25)
        assert not client.transport.aborted
        client.transport.take(min(20_000, client.transport.unread))
    await settled()
    assert client.transport.sent.endswith(app.reply)
    assert client.seconds_until_closed() <= limits.READER_SECONDS + limits.KEEP_ALIVE_SECONDS + 4 * TICK
    await settled()
    client.server.clock.advance(60)
    assert not client.transport.aborted


async def test_a_short_answer_that_is_not_fetched_before_the_end(app: EchoApp, client: FakeClient) -> None:
    app.reply = b'"%s"' % (b"x" * 20_000)
    client.transport.client_reads = False
    client.send(GET)
    await settled()
    silence = limits.KEEP_ALIVE_SECONDS + limits.READER_SECONDS * limits.MOST_SILENCES
    client.server.clock.advance(silence - TICK)
    assert not client.closed
    client.server.clock.advance(2)
    assert client.transport.aborted


async def test_a_connection_is_kept_for_a_while_after_a_slow_reader_has_read_all(
    app: EchoApp, client: FakeClient
) -> None:
    app.reply = b'"%s"' % (b"x" * 20_000)
    client.transport.client_reads = False
    client.send(GET)
    await settled()
    client.server.clock.advance(20)
    assert not client.closed
    client.transport.take(20_000)
    client.transport.take(client.transport.unread)
    assert client.seconds_until_closed() < limits.READER_SECONDS + limits.KEEP_ALIVE_SECONDS
    assert not client.transport.aborted


async def test_the_answer_that_is_written_is_told_of_its_reader(client: FakeClient) -> None:
    told: list[tuple[str, bool]] = []

    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        follow_reader = state_of(scope).follow_reader
        assert follow_reader is not None
        follow_reader(lambda paused: told.append((scope["path"], paused)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2):
            await send({"type": "http.response.body", "body": bytes(20_000), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    client.protocol.app = streaming
    client.transport.client_reads = False
    client.send(GET + GET.replace(b"/x", b"/y"))
    for path, before in (("/x", None), ("/x", "/x"), ("/y", "/x"), ("/y", "/y")):
        await settled()
        assert told == ([(before, False)] if before else []) + [(path, True)]
        told.clear()
        client.transport.take(client.transport.unread)
    await settled()
    assert told == [("/y", False)]
    client.transport.abort()
    await settled()
    assert len(told) == 1
