"""Both ends of a connection in one process: on a Unix socket, and on ports as from another machine."""

# pyright: reportPrivateUsage=false
import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
from fake_media import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_core.config import Address
from engine_core.engine_main import End
from engine_core.protocol import (
    PROTOCOL,
    Abort,
    AddRequest,
    AddRequests,
    Answer,
    Dead,
    Hello,
    Request,
    Welcome,
)
from engine_core.wire.links import SocketLink, open_engine_end
from engine_core.wire.transport import Unreachable
from engine_core.wire.unix_sockets import Channel, UnixEngineEnd
from worker.protocol import Sampling


class Heard:
    """What a link has told."""

    def __init__(self) -> None:
        self.greetings: list[Hello] = []
        self.answers: list[Answer] = []
        self.gone: list[int] = []
        self.is_reachable = self.misheard_any = False

    def reachable(self, hello: Hello) -> None:
        self.is_reachable = True

    def connected(self, hello: Hello) -> None:
        self.greetings.append(hello)

    def heard(self, number: int, answer: Answer) -> None:
        assert number == 0
        self.answers.append(answer)

    def disconnected(self, number: int) -> None:
        self.gone.append(number)

    def welcome(self) -> Welcome:
        return Welcome(PROTOCOL, 1, 1, 1)

    def misheard(self) -> None:
        self.misheard_any = True

    @property
    def greeted(self) -> bool:
        return bool(self.greetings) and self.is_reachable


@pytest.fixture(params=["unix", "ports"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    if request.param == "unix":
        return Address(f"ipc://{tmp_path}/engines")
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        first, second = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (one, two))
    return Address(first, second, "the secret of all machines of the cluster")


class Begin:
    """A function that begins to listen for engines."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.open: list[SocketLink] = []

    def __call__(self) -> tuple[SocketLink, Heard]:
        self.open.append(link := SocketLink(self.address, None))
        heard = Heard()
        link.open(heard)
        return link, heard

    def end(self) -> None:
        while self.open:
            self.open.pop().close()


@pytest_asyncio.fixture
async def begin(address: Address) -> AsyncIterator[Begin]:
    begin = Begin(address)
    yield begin
    begin.end()


@contextmanager
def opened(address: Address) -> Iterator[End]:
    context = zmq.Context()
    end = open_engine_end(context, address, 0)
    yield end
    end.close()
    context.term()


@pytest.fixture
def engine(address: Address, begin: Begin) -> Iterator[End]:
    with opened(address) as end:
        yield end


async def until(found: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not found():
            await asyncio.sleep(0.001)


async def read(engine: End, count: int) -> list[Request]:
    found: list[Request] = []

    def has_come() -> bool:
        found.extend(engine.read())
        return len(found) >= count

    await until(has_come)
    return found


async def change(engine: End, expected: str) -> None:
    def has_come() -> bool:
        list(engine.read())
        return expected in list(engine.changes())

    await until(has_come)


def send(link: SocketLink, *frames: bytes) -> None:
    """Send the frames of what is no message."""
    end = link._local or link._remote
    assert end is not None
    end.send(0, frames)


async def test_requests_go_down_and_answers_come_up(begin: Begin, engine: End) -> None:
    link, heard = begin()
    with pytest.raises(Unreachable, match="cannot be reached"):
        link.send(0, Abort(ids=[1]))
    await until(lambda: heard.greeted)
    link.send(0, Abort(ids=[1]))
    assert await read(engine, 1) == [Abort(ids=[1])]
    assert engine.send(Dead("why"))
    await until(lambda: heard.answers)
    assert [(hello.engine, hello.protocol) for hello in heard.greetings] == [(0, PROTOCOL)]
    assert heard.answers == [Dead("why")]


async def test_what_an_engine_says_before_anybody_listens_comes_behind_its_hello(
    begin: Begin, engine: End
) -> None:
    for number in range(3):
        assert engine.send(Dead(str(number)))
    _, heard = begin()
    await until(lambda: len(heard.answers) == 3)
    assert heard.answers == [Dead(str(number)) for number in range(3)]


async def test_unreadable_messages_are_dropped_and_what_follows_is_read(begin: Begin, engine: End) -> None:
    link, heard = begin()
    await until(lambda: heard.greeted)
    deep = b"\x82\xa4type\xa5Abort\xa1x" + b"\x91" * 10_000
    for frame in (b"", b"\xc1", b"\x81\xa4type\xa3Add", b"\x81\xa4type\xa4\xff\xff\xff\xff", deep):
        send(link, frame)
    link.send(0, Abort(ids=[1]))
    assert await read(engine, 1) == [Abort(ids=[1])]
    assert (engine.bad if isinstance(engine, UnixEngineEnd) else engine.requests.bad) == 5


async def test_a_server_that_does_not_read_is_told_of_and_loses_nothing(begin: Begin, engine: End) -> None:
    _, heard = begin()
    await until(lambda: heard.greeted)
    sent = 0
    keeps_up = True
    while keeps_up:
        assert sent < 100_000, "the line has no bound"
        keeps_up = engine.send(Dead(f"{sent:0500}"))
        sent += 1

    def all_came() -> bool:
        engine.flush()
        return len(heard.answers) == sent

    await until(all_came)
    assert heard.answers == [Dead(f"{number:0500}") for number in range(sent)]


async def test_a_server_that_ends_is_noticed_and_so_is_the_next(begin: Begin, engine: End) -> None:
    _, heard = begin()
    await until(lambda: heard.greeted)
    begin.end()
    await change(engine, "lost")
    assert engine.send(Dead("for nobody")) and engine.lost
    _, heard = begin()
    await change(engine, "back")
    engine.greet()
    engine.send(Dead("for the second"))
    await until(lambda: heard.answers)
    assert (len(heard.greetings), heard.answers) == (1, [Dead("for the second")])


async def test_an_engine_that_ends_is_noticed_behind_its_last_answer(begin: Begin, address: Address) -> None:
    link, heard = begin()
    with opened(address) as engine:
        await until(lambda: heard.greeted)
        engine.send(Dead("why"))
    await until(lambda: heard.gone)
    assert (heard.gone, heard.answers) == ([0], [Dead("why")])
    with pytest.raises(Unreachable):
        link.send(0, Abort(ids=[1]))


async def test_the_last_words_of_an_engine_are_read_though_it_takes_nothing_any_more(
    begin: Begin, address: Address
) -> None:
    link, heard = begin()
    with opened(address) as engine:
        await until(lambda: heard.greeted)
        engine.send(Dead("why"))
    if isinstance(engine, UnixEngineEnd):
        with pytest.raises(Unreachable):
            link.send(0, Abort(ids=[1]))
    await until(lambda: heard.gone)
    assert heard.answers == [Dead("why")]


async def test_a_request_for_a_process_that_has_ended_does_not_reach_the_next(
    begin: Begin, address: Address
) -> None:
    link, heard = begin()
    with opened(address):
        await until(lambda: heard.greeted)
    with opened(address) as following:
        time.sleep(0.05)  # it has connected, and the link has not read its greeting
        with pytest.raises(Unreachable):
            link.send(0, Abort(ids=[1]))
        await until(lambda: len(heard.greetings) == 2)
        link.send(0, Abort(ids=[2]))
        assert await read(following, 1) == [Abort(ids=[2])]


async def test_of_an_engine_that_connects_again_the_newest_connection_counts(
    begin: Begin, address: Address, engine: End
) -> None:
    link, heard = begin()
    await until(lambda: heard.greeted)
    with opened(address) as newest:
        await until(lambda: len(heard.greetings) == 2)
        engine.send(Dead("the older"))
        newest.send(Dead("the newest"))
        await until(lambda: heard.answers)
        link.send(0, Abort(ids=[1]))
        assert await read(newest, 1) == [Abort(ids=[1])]
    await until(lambda: heard.gone)
    assert (heard.answers, heard.gone) == ([Dead("the newest")], [0])


async def test_media_travel_in_frames_of_their_own_once_for_all_choices(begin: Begin, engine: End) -> None:
    link, heard = begin()
    await until(lambda: heard.greeted)
    large, small = picture(b"large", 0, 4, pixels=bytes(range(256)) * 4000), picture(b"small", 4, 2)
    one = AddRequest(id=1, tokens=[7] * 8, params=Sampling(max_tokens=1), media=(large, small))
    link.send(
        0, AddRequests([one, replace(one, id=2), AddRequest(id=3, tokens=[1], params=Sampling(max_tokens=1))])
    )
    link.send(0, Abort(ids=[1]))
    message, behind = await read(engine, 2)
    assert behind == Abort(ids=[1])
    assert isinstance(message, AddRequests)
    assert [add.id for add in message.adds] == [1, 2, 3] and message.adds[2].media == ()
    first, second = (add.media for add in message.adds[:2])
    assert [bytes(each.pixels.data) for each in first] == [large.pixels.data, small.pixels.data]
    assert all(one.pixels.data is two.pixels.data for one, two in zip(first, second, strict=True))
    assert replace(first[0], pixels=large.pixels) == large


MESSAGES = st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=3), max_size=5)


@settings(deadline=None, max_examples=100)
@given(MESSAGES, st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 3))
def test_messages_are_whole_however_their_bytes_come(
    messages: list[list[bytes]], cuts: list[int], at_once: int
) -> None:
    ours, theirs = socket.socketpair()
    sender, raw = Channel(ours), bytearray()
    for message in messages:
        sender.send(message)
    ours.shutdown(socket.SHUT_WR)
    while data := theirs.recv(65536):
        raw += data
    there, here = socket.socketpair()
    receiver, found = Channel(here), list[list[bytes]]()
    for number in range(10**6):
        size = cuts[number % len(cuts)]
        if raw:
            there.sendall(raw[:size])
            del raw[:size]
        else:
            there.close()
        for count, message in enumerate(receiver.messages(), 1):
            found.append(message)
            if count == at_once:  # as an engine does that has something else to do
                break
        if receiver.ended and not receiver.holds_message:
            break
    assert found == messages
    for each in (ours, theirs, there, here):
        each.close()
