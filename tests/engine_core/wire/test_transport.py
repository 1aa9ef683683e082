"""Both ends of a connection in one process, on real sockets."""

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq
from fake_media import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import replace

from engine_core.config import Address
from engine_core.protocol import PROTOCOL, Abort, AddRequest, AddRequests, Answer, Dead, Hello, Request
from engine_core.wire import transport
from engine_core.wire.transport import (
    MAX_REQUEST_BYTES,
    EngineEnd,
    Inbox,
    RequestTooLarge,
    ServerEnd,
    Unreachable,
    name_of,
)
from worker.buffers import Decoder, Encoder
from worker.protocol import Sampling


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


def greeted(server: ServerEnd) -> Hello:
    """Wait until both sockets are connected, and return the engine's greeting."""
    wait(server.greetings.sock)
    [(frame, hello)] = server.greetings.read_with_frames()
    assert isinstance(hello, Hello) and (hello.engine, hello.protocol) == (0, PROTOCOL)
    assert frame.bytes == name_of(hello)
    wait(server.answers.sock)
    assert list(server.read_answers()) == [(0, hello)]
    return hello


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


def test_a_request_for_a_process_that_has_ended_does_not_reach_the_next(
    address: Address, server: ServerEnd
) -> None:
    context = zmq.Context()
    first = EngineEnd(context, address, engine=0)
    greeted(server)
    first.close()
    following = EngineEnd(context, address, engine=0)
    wait(server.greetings.sock)
    with suppress(Unreachable):  # unless the socket has not noticed yet that the process has ended
        server.send(0, Abort(ids=[1]))
    wait(server.answers.sock)
    assert len(list(server.read_answers())) == 1
    server.send(0, Abort(ids=[2]))
    wait(following.requests.sock)
    assert list(following.requests.read()) == [Abort(ids=[2])]
    following.close()
    context.term()


def test_a_request_beyond_the_limit_is_refused_before_it_is_sent(server: ServerEnd) -> None:
    with pytest.raises(RequestTooLarge, match=str(MAX_REQUEST_BYTES)):
        server.send(0, Abort(ids=[2**62] * (MAX_REQUEST_BYTES // 9 + 1)))


def test_unreadable_frames_are_counted_and_what_follows_is_read(server: ServerEnd, engine: EngineEnd) -> None:
    name = name_of(greeted(server))
    deep = b"\x82\xa4type\xa5Abort\xa1x" + b"\x91" * 10_000
    for frame in (b"", b"\xc1", b"\x81\xa4type\xa3Add", b"\x81\xa4type\xa4\xff\xff\xff\xff", deep):
        server.greetings.sock.send_multipart([name, frame])
    server.send(0, Abort(ids=[1]))
    read: list[object] = []
    while not read:
        wait(engine.requests.sock)
        read += engine.requests.read()
    assert read == [Abort(ids=[1])]
    assert engine.requests.bad == 5


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


def test_media_travel_in_frames_of_their_own_once_for_all_choices(
    server: ServerEnd, engine: EngineEnd
) -> None:
    greeted(server)
    large, small = picture(b"large", 0, 4, pixels=bytes(range(256)) * 1000), picture(b"small", 4, 2)
    one = AddRequest(id=1, tokens=[7] * 8, params=Sampling(max_tokens=1), media=(large, small))
    server.send(
        0, AddRequests([one, replace(one, id=2), AddRequest(id=3, tokens=[1], params=Sampling(max_tokens=1))])
    )
    wait(engine.requests.sock)
    [message] = engine.requests.read()
    assert isinstance(message, AddRequests)
    assert [add.id for add in message.adds] == [1, 2, 3] and message.adds[2].media == ()
    first, second = (add.media for add in message.adds[:2])
    assert [bytes(each.pixels.data) for each in first] == [large.pixels.data, small.pixels.data]
    assert [each.pixels.data for each in first] == [each.pixels.data for each in second]
    assert all(one.pixels.data is two.pixels.data for one, two in zip(first, second, strict=True))
    assert replace(first[0], pixels=large.pixels) == large
    server.send(0, Abort(ids=[1]))
    wait(engine.requests.sock)
    assert list(engine.requests.read()) == [Abort(ids=[1])]


def test_too_many_bytes_of_media_are_refused_before_they_are_sent(
    server: ServerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_MEDIA_BYTES", 100)
    media = tuple(picture(bytes([at]), at, 1, pixels=bytes(60)) for at in range(2))
    with pytest.raises(RequestTooLarge, match="take 120 bytes when they are decoded; at most 100"):
        server.send(0, AddRequest(id=1, tokens=[7] * 2, params=Sampling(max_tokens=1), media=media))


WHOLE = Encoder().encode(
    AddRequests(
        [
            AddRequest(id=id, tokens=[1] * 9, params=Sampling(max_tokens=1), media=(picture(b"a", 0, 4),))
            for id in range(2)
        ]
    )
)
"""A message with two pictures, whose frames the fuzz test changes."""


class Sent:
    """A socket on which these messages have come."""

    def __init__(self, *messages: list[bytes]) -> None:
        self.messages = list(messages)

    def recv_multipart(self, *_: object, **__: object) -> list[zmq.Frame]:
        if not self.messages:
            raise zmq.Again
        return [zmq.Frame(frame) for frame in self.messages.pop(0)]


def inbox(*messages: list[bytes], head: int = 0) -> Inbox[Request]:
    return Inbox(Sent(*messages), Decoder[Request](Request), head=head)  # pyright: ignore[reportArgumentType]


WRONG = (WHOLE[:1], WHOLE[:2], [*WHOLE, b"more"], WHOLE[1:], [], [b""])


def test_a_message_whose_frames_are_lost_or_too_many_is_dropped() -> None:
    frames = [bytes(frame) for frame in WHOLE]
    assert len(frames) == 3
    box = inbox(*([bytes(frame) for frame in each] for each in WRONG), frames)
    assert [type(message) for message in box.read()] == [AddRequests]
    assert box.bad == len(WRONG)
    behind_name = inbox([b"engine-0", *frames], [b"engine-0"], head=1)
    assert [type(message) for message in behind_name.read()] == [AddRequests]
    assert behind_name.bad == 1


PARTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=9)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "id", "tokens", "params", "media", "adds", "pixels"]), inner
        )
    ),
    max_leaves=12,
)
HEADS = st.binary(max_size=40) | PARTS.map(msgpack.encode)


@st.composite
def spoiled(draw: st.DrawFn) -> list[bytes]:
    """The frames of a good message with some bytes changed, cut away, or frames in other places."""
    frames = [bytearray(frame) for frame in WHOLE]
    for _ in range(draw(st.integers(1, 4))):
        frame = frames[draw(st.integers(0, len(frames) - 1))]
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        frame[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    order = draw(st.lists(st.integers(0, len(frames) - 1), max_size=4) | st.just([0, 1, 2]))
    return [bytes(frames[number]) for number in order]


@settings(deadline=None, max_examples=300)
@given(st.lists(spoiled() | st.lists(HEADS, max_size=3), max_size=3), st.integers(0, 1))
def test_no_message_ends_the_inbox(messages: list[list[bytes]], head: int) -> None:
    box = inbox(*messages, [b"name"] * head + [msgpack.encode(Abort(ids=[1]))], head=head)
    assert list(box.read())[-1] == Abort(ids=[1])
    assert box.bad <= len(messages)
