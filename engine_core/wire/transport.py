"""Bytes between servers and engines: the codec, and the two ends of a line. Knows no request and no
sequence.

Each API server binds a ROUTER, through which requests go out to an engine by its name, and a PULL, into
which answers come; each engine connects a DEALER and a PUSH to every server. All of it lies in a folder
that only this user may enter; for engines on other machines the same two sockets listen on TCP as well, to
those who hold the cluster's keys. A frame that cannot be read is counted, logged and dropped: it never ends a
loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

import msgspec
import zmq

from engine_core.config import Address
from engine_core.protocol import PROTOCOL, Answer, Greeting, Hello, Request, Welcome
from engine_core.wire import socket_events
from engine_core.wire.keys import ClusterKeys

MAX_REQUEST_BYTES = 64 << 20
"""A longer frame makes the receiver drop the connection, so the sender refuses it first."""

_FRAMES = 10_000  # on the way in one direction, before a sender hears "full"
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 1_000  # over a network
_LINGER_MS = 300
_HEARTBEAT_MS, _SILENCE_MS = 2_000, 8_000
"""Over a network: a machine that vanishes closes nothing, it only falls silent."""

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)
_greetings = msgspec.msgpack.Decoder(Greeting)
_log = logging.getLogger(__name__)

T = TypeVar("T")


class RequestTooLarge(ValueError):
    pass


class Unreachable(Exception):
    """The engine is not connected, or does not read."""


class Inbox(Generic[T]):
    """What can be read from a socket without waiting."""

    def __init__(self, sock: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[T]) -> None:
        self.sock = sock
        self.bad = 0
        self._decoder = decoder

    def read(self) -> Iterator[T]:
        for _, message in self.read_with_frames():
            yield message

    def read_with_frames(self) -> Iterator[tuple[zmq.Frame, T]]:
        """Each message with the first frame of it, which knows where it comes from."""
        while True:
            try:
                frames = self.sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frame = frames[-1].buffer
            try:
                message = self._decoder.decode(frame)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.bad += 1
                _log.warning("dropped unreadable frame %d, of %d bytes: %s", self.bad, len(frame), error)
            else:
                yield frames[0], message


class EngineEnd:
    """An engine's lines to one API server."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: Address, engine: int) -> None:
        self._engine = engine
        dealer = _socket(context, zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, _engine_name(engine))
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.requests = Inbox(dealer, _requests)
        self.push = _socket(context, zmq.PUSH)
        for sock in (dealer, self.push):
            present_keys(sock, address)
        self.monitor = self.push.get_monitor_socket(socket_events.LOST | socket_events.INSIDE)
        self.backlog: deque[bytes] = deque()
        self.lost = False
        self._met = False
        dealer.connect(address.requests)
        self.push.connect(address.answers)
        self.greet()

    def greet(self) -> None:
        hello = _encoder.encode(Hello(engine=self._engine, protocol=PROTOCOL))
        for sock in (self.requests.sock, self.push):
            sock.send(hello, zmq.NOBLOCK)

    def send(self, answer: Answer) -> bool:
        """False if the line is full: the server has not read for thousands of steps.

        The answer is kept, so that nothing is missing if the server wakes up. It is for the caller to give up
        the server's requests, so that nothing is added. To a server that is gone, nothing is sent.
        """
        if not self.lost:
            self.backlog.append(_encoder.encode(answer))
        return self.flush()

    def flush(self) -> bool:
        while self.backlog:
            try:
                self.push.send(self.backlog[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self.backlog.popleft()
        return True

    def changes(self) -> Iterator[Literal["lost", "back"]]:
        """The server's process ended, or another one took its place."""
        for event, _ in socket_events.events(self.monitor):
            if event == socket_events.INSIDE:
                back, self.lost, self._met = self.lost, False, True
                if back:
                    yield "back"
            elif self._met:  # before that nothing was said: the first words still lie ready
                self.lost, self._met = True, False
                self.backlog.clear()
                yield "lost"

    def close(self) -> None:
        socket_events.stop(self.push, self.monitor)
        self.push.close(linger=_LINGER_MS)
        self.requests.sock.close(linger=0)


class ServerEnd:
    """An API server's end of the lines to its engines."""

    def __init__(self, address: Address, door: Address | None = None) -> None:
        """`door` is for engines of other machines, if there are any."""
        self._context = zmq.Context()
        router = _socket(self._context, zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        pull = _socket(self._context, zmq.PULL)
        self.greetings = Inbox(router, _greetings)
        self.answers = Inbox(pull, _answers)
        self.monitor = pull.get_monitor_socket(socket_events.LOST)
        self._engines: dict[int, deque[int]] = {}
        """Connection -> the engine at its other end, and one that came after it and was given its number."""
        self._newest: dict[int, int] = {}
        """Engine -> its connection. What still comes on an older one is void."""
        try:
            self._bind(address)
            if door is not None:
                self._bind(door)
        except OSError:
            self.close()
            raise

    def _bind(self, address: Address) -> None:
        for inbox, endpoint in ((self.greetings, address.requests), (self.answers, address.answers)):
            _guard(inbox.sock, address)  # counts for endpoints that are bound from here on
            try:
                inbox.sock.bind(endpoint)
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}") from error

    def send(self, engine: int, request: Request) -> None:
        frame = _encoder.encode(request)
        if len(frame) > MAX_REQUEST_BYTES:
            raise RequestTooLarge(
                f"the request takes {len(frame)} bytes; at most {MAX_REQUEST_BYTES} are allowed"
            )
        self._send(_engine_name(engine), frame)

    def welcome(self, peer: bytes, welcome: Welcome) -> None:
        self._send(peer, _encoder.encode(welcome))

    def _send(self, peer: bytes, frame: bytes) -> None:
        try:
            self.greetings.sock.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise Unreachable(f"the engine cannot be reached: {error.strerror}") from error

    def read_greetings(self) -> Iterator[tuple[bytes, Greeting]]:
        """Each with the name of the peer, for an answer."""
        for frame, greeting in self.greetings.read_with_frames():
            yield frame.bytes, greeting

    def read_answers(self) -> Iterator[tuple[int, Answer]]:
        """Each with the engine that gives it: the one whose Hello opened this connection."""
        for frame, answer in self.answers.read_with_frames():
            connection = int(frame.get(zmq.SRCFD))
            if isinstance(answer, Hello):
                self._engines.setdefault(connection, deque()).append(answer.engine)
                self._newest[answer.engine] = connection
            engines = self._engines.get(connection)
            if engines and self._newest[engines[-1]] == connection:
                yield engines[-1], answer

    def left(self) -> list[int]:
        """Connected engines whose processes have ended, or cannot be heard, since the last call.

        What they had said must have been read before. An engine that is back already is not told of.
        """
        gone: list[int] = []
        for _, connection in socket_events.events(self.monitor):
            if self._engines.get(connection):  # or it was a stranger, who was not let in
                engine = self._engines[connection].popleft()
                if self._newest.get(engine) == connection and engine not in self._engines[connection]:
                    del self._newest[engine]
                    gone.append(engine)
        return gone

    def close(self) -> None:
        socket_events.stop(self.answers.sock, self.monitor)
        for inbox in (self.greetings, self.answers):
            inbox.sock.close(linger=0)
        self._context.term()


def _engine_name(index: int) -> bytes:
    return b"engine-%d" % index


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    sock = context.socket(kind)
    sock.setsockopt(zmq.SNDHWM, _FRAMES)
    sock.setsockopt(zmq.RCVHWM, _FRAMES)
    sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    sock.setsockopt(zmq.LINGER, _LINGER_MS)
    return sock


def _guard(sock: zmq.Socket[bytes], address: Address) -> None:
    if address.secret is not None:
        ClusterKeys.derive(address.secret).guard(sock)
        _listen_for_silence(sock, address)


def present_keys(sock: zmq.Socket[bytes], address: Address) -> None:
    """Before connecting to an address that other machines can reach."""
    if address.secret is not None:
        ClusterKeys.derive(address.secret).present(sock)
        _listen_for_silence(sock, address)


def _listen_for_silence(sock: zmq.Socket[bytes], address: Address) -> None:
    sock.setsockopt(zmq.IPV6, int("[" in address.requests))
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
