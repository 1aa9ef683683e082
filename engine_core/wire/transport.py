"""The sockets between API servers and engines of other machines, and the frames of messages.

Each API server binds a ROUTER, through which requests go out to an engine by its name, and a PULL, into which
answers come; each engine connects a DEALER and a PUSH to every server. The name is that of the engine's
process, which a server learns with its first answer: a request that was sent to one that has ended does not
reach the next one, which may not know yet which weights to use, or that all are paused. The sockets listen on
TCP, to those who hold the cluster's keys; engines of the same machine are connected by `unix_sockets.py`. A
message is one frame, and further ones if it holds media. One that cannot be read is counted, logged and
dropped: it never ends a loop.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

MOST_WAITING = 10_000
"""Messages in flight in one direction, before sending fails."""
RECONNECT_SECONDS = 0.02
LINGER_SECONDS = 0.3
"""Seconds for the last messages to be sent when a connection is closed."""
_RECONNECT_MAX_MS = 1_000  # over a network
_HEARTBEAT_MS, _TIMEOUT_MS = 2_000, 8_000  # over a network, where a machine that vanishes closes nothing

_encoder = msgspec.msgpack.Encoder()
_buffer = attrgetter("buffer")
_log = logging.getLogger(__name__)

T = TypeVar("T")


class RequestTooLarge(ValueError):
    """A request would be longer than MAX_REQUEST_BYTES, or its media than MAX_MEDIA_BYTES."""


class Unreachable(Exception):
    """The engine is not connected, or does not read."""


class MessageDecoder(Generic[T]):
    """Decodes messages, and counts, logs and drops those that cannot be read."""

    def __init__(self, decoder: Decoder[T]) -> None:
        self.bad = 0
        self._decoder = decoder

    def decode(self, parts: Sequence[Bytes], head: int = 0) -> T | None:
        """The message of these frames, of which `head` is its own; None if it cannot be read."""
        try:
            return self._decoder.decode(parts[head], parts[head + 1 :])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
            self.bad += 1
            sizes = [len(part) for part in parts]
            _log.warning("dropped unreadable message %d, of %s bytes: %s", self.bad, sizes, error)
            return None


class Inbox(MessageDecoder[T]):
    """The receiving side of a socket, which never waits."""

    def __init__(self, sock: zmq.Socket[bytes], decoder: Decoder[T], *, head: int = 0) -> None:
        """`head` is the place of a message's own frame: a ROUTER puts the name of the sender before it."""
        super().__init__(decoder)
        self.sock = sock
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
            if (message := self.decode([*map(_buffer, frames)], self._head)) is not None:
                yield frames[0], message


def frames_of(request: Request, encoder: Encoder) -> list[Bytes]:
    """The frames of a request. Raises RequestTooLarge."""
    frames = encoder.encode(request)
    if len(frames[0]) > MAX_REQUEST_BYTES:
        raise RequestTooLarge(
            f"the request takes {len(frames[0])} bytes; at most {MAX_REQUEST_BYTES} are allowed"
        )
    if len(frames) > 1 and (size := sum(memoryview(each).nbytes for each in frames[1:])) > MAX_MEDIA_BYTES:
        raise RequestTooLarge(
            f"the media of the request take {size} bytes when they are decoded; at most "
            f"{MAX_MEDIA_BYTES} are allowed"
        )
    return frames


class EngineEnd:
    """An engine's sockets to one API server of another machine."""

    holds_message = False
    """Whether a message was read and not handed out: none is, as sockets of ZMQ hold them."""

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

    def watch(self, poller: zmq.Poller) -> None:
        """Let the next poll wake when messages come, or when some of the backlog can be sent."""
        poller.register(self.requests.sock, zmq.POLLIN)
        poller.register(self.push, zmq.POLLOUT if self.backlog else 0)

    def has_come(self, ready: dict[object, int]) -> bool:
        """Whether messages can be read, as a poll has found."""
        return self.requests.sock in ready

    def read(self) -> Iterator[Request]:
        """Each message that has come."""
        return self.requests.read()

    def wait_until_connected(self, seconds: float) -> None:
        self.monitor.poll(int(1000 * seconds))

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
        self.push.close(linger=int(1000 * LINGER_SECONDS))
        self.requests.sock.close(linger=0)


class ServerEnd:
    """An API server's sockets to all its engines of other machines."""

    def __init__(self, address: Address) -> None:
        self._context = zmq.Context()
        router = _socket(self._context, zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        pull = _socket(self._context, zmq.PULL)
        self.greetings = Inbox(router, Decoder[Greeting](Greeting), head=1)
        self.answers = Inbox(pull, Decoder[Answer](Answer))
        self.monitor = pull.get_monitor_socket(DISCONNECTED)
        self._engines: dict[int, deque[int]] = {}
        """Connection -> the engine at its other end, then the engines of later connections of this number."""
        self._newest: dict[int, int] = {}
        """Engine -> its connection. What still comes on an older connection is dropped."""
        self._names: dict[int, bytes] = {}
        """Engine -> the name of its newest process."""
        try:
            self._bind(address)
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

    def send(self, engine: int, frames: Sequence[Bytes]) -> None:
        """Send a request. Raises Unreachable if the engine does not take it now."""
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
    sock.setsockopt(zmq.SNDHWM, MOST_WAITING)
    sock.setsockopt(zmq.RCVHWM, MOST_WAITING)
    sock.setsockopt(zmq.RECONNECT_IVL, int(1000 * RECONNECT_SECONDS))
    sock.setsockopt(zmq.LINGER, int(1000 * LINGER_SECONDS))
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


def guarded(listener: Listener, read: Callable[..., None], *args: object) -> None:
    """Read what has come; an error in handling it must not be lost, because somebody waits for the answer."""
    try:
        read(*args)
    except Exception:
        _log.exception("an answer of an engine could not be handled")
        listener.misheard()
