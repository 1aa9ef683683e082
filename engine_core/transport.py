"""Bytes between servers and engines: the codec, and the two ends of a line. Knows no request and no
sequence.

Each API server binds a ROUTER, through which requests go out to an engine by its name, and a PULL, into
which answers come; each engine connects a DEALER and a PUSH to every server. All of it lies in a folder
that only this user may enter. A frame that cannot be read is counted, logged and dropped: it never ends a
loop.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

import msgspec
import zmq

from engine_core.config import Address
from engine_core.protocol import PROTOCOL, Answer, Hello, Request

MAX_REQUEST_BYTES = 64 << 20
"""A longer frame makes the receiver drop the connection, so the sender refuses it first."""

_FRAMES = 10_000  # on the way in one direction, before a sender hears "full"
_RECONNECT_MS = 20
_LINGER_MS = 300

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)
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
        while True:
            try:
                frame = self.sock.recv_multipart(zmq.NOBLOCK)[-1]
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.bad += 1
                _log.warning("dropped unreadable frame %d, of %d bytes: %s", self.bad, len(frame), error)
            else:
                yield message


class EngineEnd:
    """An engine's line to one API server."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: Address, engine: int) -> None:
        self._engine = engine
        dealer = _socket(context, zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, _engine_name(engine))
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.requests = Inbox(dealer, _requests)
        self.push = _socket(context, zmq.PUSH)
        self.monitor = self.push.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.backlog: deque[bytes] = deque()
        self.lost = False
        dealer.connect(address.requests)
        self.push.connect(address.answers)
        self.greet()

    def greet(self) -> None:
        self.requests.sock.send(_encoder.encode(Hello(engine=self._engine, protocol=PROTOCOL)), zmq.NOBLOCK)

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
        for event in _events(self.monitor):
            if event == zmq.EVENT_DISCONNECTED:
                self.lost = True
                self.backlog.clear()
                yield "lost"
            elif self.lost:
                self.lost = False
                yield "back"

    def close(self) -> None:
        _stop_monitor(self.push, self.monitor)
        self.push.close(linger=_LINGER_MS)
        self.requests.sock.close(linger=0)


class ServerEnd:
    """An API server's end of the lines to its engines."""

    def __init__(self, address: Address) -> None:
        self._context = zmq.Context()
        router = _socket(self._context, zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        pull = _socket(self._context, zmq.PULL)
        self.hellos = Inbox(router, _answers)
        self.answers = Inbox(pull, _answers)
        self.monitor = pull.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        router.bind(address.requests)
        pull.bind(address.answers)

    def send(self, engine: int, request: Request) -> None:
        frame = _encoder.encode(request)
        if len(frame) > MAX_REQUEST_BYTES:
            raise RequestTooLarge(
                f"the request takes {len(frame)} bytes; at most {MAX_REQUEST_BYTES} are allowed"
            )
        try:
            self.hellos.sock.send_multipart([_engine_name(engine), frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise Unreachable(f"the engine cannot be reached: {error.strerror}") from error

    def engine_left(self) -> bool:
        """Whether a connected engine's process has ended since the last call."""
        return zmq.EVENT_DISCONNECTED in list(_events(self.monitor))

    def close(self) -> None:
        _stop_monitor(self.answers.sock, self.monitor)
        for inbox in (self.hellos, self.answers):
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


def _events(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    while True:
        try:
            head, _endpoint = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield struct.unpack_from("=H", head)[0]


def _stop_monitor(sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    sock.disable_monitor()
    monitor.close(linger=0)
