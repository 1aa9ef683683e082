"""Both ends of a connection in one process, on real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from engine_core.config import Address
from engine_core.protocol import PROTOCOL, Abort, Answer, Dead, Hello
from engine_core.wire.transport import MAX_REQUEST_BYTES, EngineEnd, RequestTooLarge, ServerEnd, Unreachable

HELLO = Hello(engine=0, protocol=PROTOCOL)


@pytest.fixture
def server(address: Address) -> Iterator[ServerEnd]:
    end = ServerEnd(address)
    yield end
    end.close()


@pytest.fixture
def engine(address: Address) -> Iterator[EngineEnd]:
    context = zmq.Context()
    end = EngineEnd(context, address, engine=0)
    yield end
    end.close()
    context.term()


def wait(sock: zmq.Socket[bytes]) -> None:
    assert sock.poll(5000), "nothing came"


def greeted(server: ServerEnd) -> None:
    """Wait until both sockets are connected."""
    wait(server.greetings.sock)
    assert [(frame.bytes, hello) for frame, hello in server.greetings.read_with_frames()] == [
        (b"engine-0", HELLO)
    ]
    wait(server.answers.sock)
    assert list(server.read_answers()) == [(0, HELLO)]


def changes(engine: EngineEnd, expected: str) -> None:
    seen: list[str] = []
    while expected not in seen:
        wait(engine.monitor)
        seen += engine.changes()


def test_requests_go_down_and_answers_come_up(server: ServerEnd, engine: EngineEnd) -> None:
    greeted(server)
    server.send(0, Abort(ids=[1]))
    wait(engine.requests.sock)
    assert list(engine.requests.read()) == [Abort(ids=[1])]
    assert engine.send(Dead("why"))
    wait(server.answers.sock)
    assert list(server.read_answers()) == [(0, Dead("why"))]


def test_an_engine_that_is_not_there_is_unreachable(server: ServerEnd) -> None:
    with pytest.raises(Unreachable, match="cannot be reached"):
        server.send(0, Abort(ids=[1]))


def test_a_request_beyond_the_limit_is_refused_before_it_is_sent(server: ServerEnd) -> None:
    with pytest.raises(RequestTooLarge, match=str(MAX_REQUEST_BYTES)):
        server.send(0, Abort(ids=[2**62] * (MAX_REQUEST_BYTES // 9 + 1)))


def test_unreadable_frames_are_counted_and_what_follows_is_read(server: ServerEnd, engine: EngineEnd) -> None:
    greeted(server)
    for frame in (b"", b"\xc1", b"\x81\xa4type\xa3Add", b"\x81\xa4type\xa4\xff\xff\xff\xff"):
        server.greetings.sock.send_multipart([b"engine-0", frame])
    server.send(0, Abort(ids=[1]))
    read: list[object] = []
    while not read:
        wait(engine.requests.sock)
        read += engine.requests.read()
    assert read == [Abort(ids=[1])]
    assert engine.requests.bad == 4


def test_a_server_that_does_not_read_is_told_of_and_loses_nothing(
    server: ServerEnd, engine: EngineEnd
) -> None:
    greeted(server)
    sent = 0
    keeps_up = True
    while keeps_up:
        assert sent < 100_000, "the line has no bound"
        keeps_up = engine.send(Dead(str(sent)))
        sent += 1
    read: list[tuple[int, Answer]] = []
    deadline = time.monotonic() + 10
    while len(read) < sent and time.monotonic() < deadline:
        read += server.read_answers()
        engine.flush()
    assert read == [(0, Dead(str(number))) for number in range(sent)]


def test_a_server_that_ends_is_noticed_and_so_is_the_next(address: Address, engine: EngineEnd) -> None:
    first = ServerEnd(address)
    greeted(first)
    engine.send(Dead("for the first"))
    wait(first.answers.sock)
    first.close()
    changes(engine, "lost")
    assert engine.send(Dead("for nobody"))
    second = ServerEnd(address)
    changes(engine, "back")
    engine.greet()
    greeted(second)
    engine.send(Dead("for the second"))
    wait(second.answers.sock)
    assert list(second.read_answers()) == [(0, Dead("for the second"))]
    second.close()


def test_an_engine_that_ends_is_noticed(server: ServerEnd, address: Address) -> None:
    context = zmq.Context()
    engine = EngineEnd(context, address, engine=0)
    greeted(server)
    assert server.disconnected() == []
    engine.close()
    context.term()
    wait(server.monitor)
    assert server.disconnected() == [0]
    assert server.disconnected() == []
