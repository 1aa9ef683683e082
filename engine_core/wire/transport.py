"""The sockets between API servers and engines, and the frames in which messages pass through them.

Each API server binds a ROUTER, through which requests go out to an engine by its name, and a PULL, into which
answers come; each engine connects a DEALER and a PUSH to every server. The name is that of the engine's
process, which a server learns with its first answer: a request that was sent to one that has ended does not
reach the next one, which may not know yet which weights to use, or that all are paused. The sockets lie in a
folder that only this user may enter; for engines on other machines the same two sockets listen on TCP as
well, to those who hold the cluster's keys. A message is one frame, and further ones if it holds media. One
that cannot be read is counted, logged and dropped: it never ends a loop.

An API server's client reads its sockets from the event loop's own poll (`SocketLink`): no task, lock or queue
per token.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
import zmq

from engine_core.config import Address
from engine_core.protocol import PROTOCOL, Answer, Greeting, Hello, Request, Welcome
from engine_core.wire.sockets import CONNECTED, DISCONNECTED, ClusterKeys, socket_events, stop_monitor
from worker.buffers import Bytes, Decoder, Encoder

MAX_REQUEST_BYTES = 64 << 20
"""The most bytes of a request without its media."""
MAX_MEDIA_BYTES = 512 << 20
"""The most bytes of a request's media together. A longer frame makes the receiver drop the connection, so the
sender refuses it first."""

_FRAMES = 10_000  # in flight in one direction, before sending fails
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 1_000  # over a network
_LINGER_MS = 300
_HEARTBEAT_MS, _TIMEOUT_MS = 2_000, 8_000  # over a network, where a machine that vanishes closes nothing

_encoder = msgspec.msgpack.Encoder()
_buffer = attrgetter("buffer")
_log = logging.getLogger(__name__)

T = TypeVar("T")


class RequestTooLarge(ValueError):
    """A request would be longer than MAX_REQUEST_BYTES, or its media than MAX_MEDIA_BYTES."""


class Unreachable(Exception):
    """The engine is not connected, or does not read."""


class Inbox(Generic[T]):
    """The receiving side of a socket, which decodes messages and never waits."""

    def __init__(self, sock: zmq.Socket[bytes], decoder: Decoder[T], *, head: int = 0) -> None:
        """`head` is the place of a message's own frame: a ROUTER puts the name of the sender before it."""
        self.sock = sock
        self.bad = 0
        self._decoder = decoder
        self._head = head

    def read(self) -> Iterator[T]:
        for _, message in self.read_with_frames():
            yield message

    def read_with_frames(self) -> Iterator[tuple[zmq.Frame, T]]:
        """Each message that has come, with its first frame, which knows the connection it came through."""
        while True:
            try:
                frames = self.sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            parts = [*map(_buffer, frames)]
            try:
                message = self._decoder.decode(parts[self._head], parts[self._head + 1 :])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
                self.bad += 1
                sizes = [len(part) for part in parts]
                _log.warning("dropped unreadable message %d, of %s bytes: %s", self.bad, sizes, error)
            else:
                yield frames[0], message


class EngineEnd:
    """An engine's sockets to one API server."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: Address, engine: int) -> None:
        self._hello = Hello(engine=engine, protocol=PROTOCOL, process=secrets.token_hex(4))
        dealer = _socket(context, zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, name_of(self._hello))
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MEDIA_BYTES)
        self.requests = Inbox(dealer, Decoder[Request](Request))
        self.push = _socket(context, zmq.PUSH)
        for sock in (dealer, self.push):
            secure(sock, address, listens=False)
        self.monitor = self.push.get_monitor_socket(DISCONNECTED | CONNECTED)
        self.backlog: deque[bytes] = deque()
        self.lost = False
        """Whether the server has gone, and no other one has taken its place yet."""
        self._connected = False
        dealer.connect(address.requests)
        self.push.connect(address.answers)
        self.greet()

    def greet(self) -> None:
        hello = _encoder.encode(self._hello)
        for sock in (self.requests.sock, self.push):
            sock.send(hello, zmq.NOBLOCK)

    def send(self, answer: Answer) -> bool:
        """Send, or keep what cannot be sent now; False if the server has not read for thousands of steps.

        The answer is kept, so that nothing is missing if the server goes on. The caller has to abort the
        server's requests, so that nothing is added. To a server that is gone, nothing is sent.
        """
        if not self.lost:
            self.backlog.append(_encoder.encode(answer))
        return self.flush()

    def flush(self) -> bool:
        """Send the backlog; returns False if some of it is left."""
        while self.backlog:
            try:
                self.push.send(self.backlog[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self.backlog.popleft()
        return True

    def changes(self) -> Iterator[Literal["lost", "back"]]:
        """The changes since the last call: "lost" if the server ended, "back" if another took its place."""
        for event, _ in socket_events(self.monitor):
            if event == CONNECTED:
                back, self.lost, self._connected = self.lost, False, True
                if back:
                    yield "back"
            elif self._connected:  # before that nothing was sent: the first messages still wait in the socket
                self.lost, self._connected = True, False
                self.backlog.clear()
                yield "lost"

    def close(self) -> None:
        stop_monitor(self.push, self.monitor)
        self.push.close(linger=_LINGER_MS)
        self.requests.sock.close(linger=0)


class ServerEnd:
    """An API server's sockets to all its engines."""

    def __init__(self, address: Address, tcp_address: Address | None = None) -> None:
        """`tcp_address` is for engines of other machines, if there are any."""
        self._context = zmq.Context()
        router = _socket(self._context, zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        pull = _socket(self._context, zmq.PULL)
        self.greetings = Inbox(router, Decoder[Greeting](Greeting), head=1)
        self.answers = Inbox(pull, Decoder[Answer](Answer))
        self._encoder = Encoder()
        self.monitor = pull.get_monitor_socket(DISCONNECTED)
        self._engines: dict[int, deque[int]] = {}
        """Connection -> the engine at its other end, then the engines of later connections of this number."""
        self._newest: dict[int, int] = {}
        """Engine -> its connection. What still comes on an older connection is dropped."""
        self._names: dict[int, bytes] = {}
        """Engine -> the name of its newest process."""
        try:
            self._bind(address)
            if tcp_address is not None:
                self._bind(tcp_address)
        except OSError:
            self.close()
            raise

    def _bind(self, address: Address) -> None:
        for inbox, endpoint in ((self.greetings, address.requests), (self.answers, address.answers)):
            secure(inbox.sock, address, listens=True)  # applies to endpoints that are bound from here on
            try:
                inbox.sock.bind(endpoint)
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}") from error

    def send(self, engine: int, request: Request) -> None:
        """Send a request. Raises RequestTooLarge, or Unreachable if the engine does not take it now."""
        frames = self._encoder.encode(request)
        if len(frames[0]) > MAX_REQUEST_BYTES:
            raise RequestTooLarge(
                f"the request takes {len(frames[0])} bytes; at most {MAX_REQUEST_BYTES} are allowed"
            )
        if (
            len(frames) > 1
            and (size := sum(memoryview(each).nbytes for each in frames[1:])) > MAX_MEDIA_BYTES
        ):
            raise RequestTooLarge(
                f"the media of the request take {size} bytes when they are decoded; at most "
                f"{MAX_MEDIA_BYTES} are allowed"
            )
        self._send(self._names.get(engine, b""), *frames)

    def welcome(self, name: bytes, welcome: Welcome) -> None:
        self._send(name, _encoder.encode(welcome))

    def _send(self, name: bytes, *frames: Bytes) -> None:
        """Send a message to an engine. Only small frames are copied (`zmq.COPY_THRESHOLD`)."""
        try:
            self.greetings.sock.send_multipart([name, *frames], zmq.NOBLOCK, copy=len(frames) == 1)
        except zmq.ZMQError as error:
            raise Unreachable(f"the engine cannot be reached: {error.strerror}") from error

    def read_answers(self) -> Iterator[tuple[int, Answer]]:
        """Each answer that has come, with the engine that gives it, whose Hello opened this connection."""
        for frame, answer in self.answers.read_with_frames():
            connection = int(frame.get(zmq.SRCFD))
            if isinstance(answer, Hello):
                self._engines.setdefault(connection, deque()).append(answer.engine)
                self._newest[answer.engine] = connection
                self._names[answer.engine] = name_of(answer)
            engines = self._engines.get(connection)
            if engines and self._newest[engines[-1]] == connection:
                yield engines[-1], answer

    def disconnected(self) -> list[int]:
        """Engines whose connections have ended since the last call, and are not back. Read answers before."""
        gone: list[int] = []
        for _, connection in socket_events(self.monitor):
            if self._engines.get(connection):  # or it was a stranger, who was refused
                engine = self._engines[connection].popleft()
                if self._newest.get(engine) == connection and engine not in self._engines[connection]:
                    del self._newest[engine]
                    gone.append(engine)
        return gone

    def close(self) -> None:
        stop_monitor(self.answers.sock, self.monitor)
        for inbox in (self.greetings, self.answers):
            inbox.sock.close(linger=0)
        self._context.term()


def name_of(hello: Hello) -> bytes:
    """The name by which requests reach the process that says hello."""
    return f"engine-{hello.engine}-{hello.process}".encode()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    sock = context.socket(kind)
    sock.setsockopt(zmq.SNDHWM, _FRAMES)
    sock.setsockopt(zmq.RCVHWM, _FRAMES)
    sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    sock.setsockopt(zmq.LINGER, _LINGER_MS)
    return sock


def secure(sock: zmq.Socket[bytes], address: Address, *, listens: bool) -> None:
    """Let a socket have keys, and end connections whose other end is silent, if the address needs that."""
    if address.secret is None:
        return
    keys = ClusterKeys.derive(address.secret)
    (keys.guard if listens else keys.present)(sock)
    sock.setsockopt(zmq.IPV6, int("[" in address.requests))
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TIMEOUT_MS)


class Listener(Protocol):
    """A client, as a link calls it with the messages of engines."""

    def reachable(self, hello: Hello) -> None:
        """Note that requests can be sent to an engine from now on."""
        ...

    def connected(self, hello: Hello) -> None:
        """Note that answers come from an engine: a new one, one in another's place, or the same one again."""
        ...

    def heard(self, number: int, answer: Answer) -> None:
        """Take an answer of the engine of this number."""
        ...

    def disconnected(self, number: int) -> None:
        """Note that the connection of an engine has ended, whose answers are all heard."""
        ...

    def welcome(self) -> Welcome:
        """What a machine is told that wants to start engines."""
        ...

    def misheard(self) -> None:
        """Note that an answer could not be handled, so that a request may wait for ever."""
        ...


class Link(Protocol):
    """Carries messages to engines, and their answers to the listener with which it is opened."""

    def open(self, listener: Listener) -> None: ...

    def send(self, number: int, request: Request) -> None:
        """Send to the engine of a number. Raises Unreachable or RequestTooLarge."""
        ...

    def read(self) -> None:
        """Have the listener hear all answers that have come."""
        ...

    def close(self) -> None: ...


class SocketLink:
    """Carries messages between an API server's client and its engines through sockets."""

    def __init__(self, address: Address, tcp_address: Address | None) -> None:
        """`tcp_address` is for engines of other machines, if there are any."""
        self._end = ServerEnd(address, tcp_address)
        self._loop = asyncio.get_running_loop()
        self._descriptors: list[int] = []

    def open(self, listener: Listener) -> None:
        self._listener = listener
        readers = {
            self._end.greetings.sock.FD: self._read_greetings,
            self._end.answers.sock.FD: self.read,
            self._end.monitor.FD: self._read_monitor,
        }
        for descriptor, read in readers.items():
            self._descriptors.append(descriptor)
            self._loop.add_reader(descriptor, self._read_or_fail, read)
            read()  # a descriptor of ZMQ wakes only for what comes after the socket was found empty

    def send(self, number: int, request: Request) -> None:
        self._end.send(number, request)
        self._read_greetings()  # sending may clear the socket's one notice that something can be read

    def read(self) -> None:
        for number, answer in self._end.read_answers():
            if isinstance(answer, Hello):
                self._listener.connected(answer)
            else:
                self._listener.heard(number, answer)

    def close(self) -> None:
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._descriptors.clear()
        self._end.close()

    def _read_or_fail(self, read: Callable[[], None]) -> None:
        try:
            read()
        except Exception:
            _log.exception("an answer of an engine could not be handled")
            self._listener.misheard()

    def _read_greetings(self) -> None:
        for frame, greeting in self._end.greetings.read_with_frames():
            if isinstance(greeting, Hello):
                self._listener.reachable(greeting)
                continue
            with suppress(Unreachable):  # the machine that wants to join has gone again
                self._end.welcome(frame.bytes, self._listener.welcome())

    def _read_monitor(self) -> None:
        self.read()  # its last answers came before its end
        for number in self._end.disconnected():
            self._listener.disconnected(number)
