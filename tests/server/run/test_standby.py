"""The stand-by listener answers whatever comes at once, and leaves the port to others when it is closed."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from certificates import make_certificate

from server.options.parse_server_options import parse
from server.run import standby
from server.run.commands import bind
from server.run.standby import Standby

READY = b"GET /ready?x=1 HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bind(parse(["--port", "0"], {})) as found:
        yield found


Make = Callable[..., Standby]


@pytest_asyncio.fixture
async def make(listener: socket.socket) -> AsyncIterator[Make]:
    """A function that makes a stand-by listener for a server with these flags."""
    made: list[Standby] = []

    def build(*flags: str, at: socket.socket = listener) -> Standby:
        made.append(Standby(at, parse(flags, {})))
        return made[-1]

    yield build
    for found in made:
        await found.finish(2)


@pytest.fixture
async def open_standby(make: Make) -> Standby:
    found = make()
    found.open("engine_given_up")
    return found


async def connect(
    listener: socket.socket, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*listener.getsockname(), ssl=tls)


async def ask(listener: socket.socket, request: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """The whole answer to a request, up to the end of the connection."""
    reader, writer = await connect(listener, tls)
    writer.write(request)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


def parsed(answer: bytes) -> tuple[int, dict[str, str], dict]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.title(): value for name, value in (line.split(": ") for line in lines)}
    assert int(headers["Content-Length"]) == len(body)
    return int(first.split()[1]), headers, json.loads(body)


async def test_the_process_lives_and_all_else_has_to_wait(
    listener: socket.socket, open_standby: Standby
) -> None:
    status, headers, body = parsed(await ask(listener, b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"))
    assert (status, body, headers["Connection"]) == (200, {"state": "live"}, "close")
    for request in (READY, b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", b"?\r\n\r\n"):
        status, headers, body = parsed(await ask(listener, request))
        assert (status, headers["Retry-After"], headers["Connection"]) == (503, "5", "close")
        error = body["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == 503 and error["type"] == "engine_given_up" and "log" in error["message"]


async def test_each_api_is_refused_in_its_own_shape(listener: socket.socket, open_standby: Standby) -> None:
    _, _, body = parsed(await ask(listener, b"POST /v1/messages?beta=true HTTP/1.1\r\n\r\n"))
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")


async def test_a_head_request_has_no_body(listener: socket.socket, open_standby: Standby) -> None:
    answer = await ask(listener, b"HEAD /live HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\n")


async def test_a_path_may_have_the_prefix_of_a_proxy(listener: socket.socket, make: Make) -> None:
    make("--root-path", "/llm").open("draining")
    status, _, _ = parsed(await ask(listener, b"GET /llm/live HTTP/1.1\r\n\r\n"))
    assert status == 200


async def test_an_endless_head_is_read_up_to_a_limit(listener: socket.socket, open_standby: Standby) -> None:
    status, _, _ = parsed(await ask(listener, b"GET /x HTTP/1.1\r\nA: " + b"a" * standby.MAX_HEAD))
    assert status == 503


async def test_half_a_head_is_answered_after_a_while(
    listener: socket.socket, open_standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "HEAD_SECONDS", 0.02)
    status, _, _ = parsed(await ask(listener, b"GET /li"))
    assert status == 503


async def test_a_large_body_does_not_cost_the_client_its_answer(
    listener: socket.socket, open_standby: Standby
) -> None:
    """If the connection were closed while the body is on its way, it would be reset."""
    reader, writer = await connect(listener)
    writer.write(b"POST / HTTP/1.1\r\nContent-Length: 8000000\r\n\r\n")
    for _ in range(8):
        writer.write(bytes(1_000_000))
        await writer.drain()
    async with asyncio.timeout(60):
        assert parsed(await reader.read())[0] == 503
    writer.close()


async def test_a_slow_body_is_read_as_long_as_it_comes(
    listener: socket.socket, open_standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "LINGER_SECONDS", 0.2)
    reader, writer = await connect(listener)
    writer.write(b"POST / HTTP/1.1\r\nContent-Length: 20\r\n\r\n")
    for _ in range(20):
        await asyncio.sleep(0.03)
        writer.write(b"x")
        await writer.drain()
    async with asyncio.timeout(60):
        assert parsed(await reader.read())[0] == 503
    writer.close()


async def test_a_body_without_end_is_read_for_a_while(
    listener: socket.socket, open_standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "LINGER_SECONDS", 60.0)
    monkeypatch.setattr(standby, "MOST_LINGER_SECONDS", 0.05)
    reader, writer = await connect(listener)
    writer.write(b"POST / HTTP/1.1\r\nContent-Length: 9000\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(30):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)


async def test_too_many_are_answered_before_they_ask(
    listener: socket.socket, open_standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "MAX_VISITORS", 1)
    _, first = await connect(listener)
    await asyncio.sleep(0)
    assert parsed(await ask(listener, b""))[0] == 503
    first.close()


async def test_a_closed_one_leaves_connections_to_others(listener: socket.socket, make: Make) -> None:
    with listener.dup() as shared:
        shared.setblocking(False)
        mine, theirs = make(), make(at=shared)
        mine.open("api_restarting")
        mine.close()
        theirs.open("draining")
        answers = await asyncio.gather(*(ask(listener, READY) for _ in range(20)))
        assert {parsed(answer)[2]["error"]["type"] for answer in answers} == {"draining"}
        mine.open("api_restarting")
        answers = await asyncio.gather(*(ask(listener, READY) for _ in range(20)))
        assert all(parsed(answer)[0] == 503 for answer in answers), "whoever accepts it answers"
        theirs.close()


async def test_the_last_ones_are_answered_even_if_they_say_nothing(
    listener: socket.socket, open_standby: Standby
) -> None:
    address = listener.getsockname()
    reader, writer = await connect(listener)
    await open_standby.finish(0.05)
    assert parsed(await reader.read())[0] == 503
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_who_connects_in_the_last_moment_is_answered_unheard(
    listener: socket.socket, make: Make
) -> None:
    with socket.create_connection(listener.getsockname()) as client:
        await make().finish(0)  # it was not open, and has accepted nobody
        assert parsed(client.recv(10_000))[0] == 503


async def test_it_speaks_tls_where_the_server_does(
    listener: socket.socket, make: Make, tmp_path: Path
) -> None:
    key, certificate = make_certificate(tmp_path)
    make("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)).open("draining")
    trusting = ssl.create_default_context(cafile=certificate)
    trusting.check_hostname = False
    assert parsed(await ask(listener, READY, trusting))[0] == 503
    assert await ask(listener, READY) == b"", "who speaks no TLS gets no answer"


async def test_without_a_usable_certificate_it_stays_away(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = tmp_path / "certificate"
    bad.write_text("nothing")
    found = make("--ssl-keyfile", str(bad), "--ssl-certfile", str(bad))
    found.open("draining")
    assert not found.is_open
    assert "the certificate cannot be used" in caplog.text
