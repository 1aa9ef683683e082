"""Messages between an API server and the engines of its machine: a Unix socket for each pair of them.

Whoever sends writes to the socket, and whoever waits for it reads. ZMQ, which connects machines
(`transport.py`), has a thread at both ends that a message passes, and beside cores that compute, each waking
of a thread takes longer than a message. Neither end ever waits: what a socket does not take now is kept.

A message is the number of its frames and their lengths, as 32-bit numbers, and then the frames.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Literal

import msgspec
import zmq

from engine_core.config import Address
from engine_core.protocol import PROTOCOL, Answer, Hello, Request
from engine_core.wire.transport import (
    LINGER_SECONDS,
    MOST_WAITING,
    RECONNECT_SECONDS,
    Listener,
    MessageDecoder,
    Unreachable,
    guarded,
)
from worker.buffers import Bytes, Decoder

_READ_BYTES = 256 << 10
_NEWCOMERS = 128
"""Engines that may wait to be accepted."""

_encode = msgspec.msgpack.Encoder().encode


class Channel:
    """A connected socket, on which no call waits."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.ended = False
        """Whether the other end has gone, and all that it has sent was read."""
        self.fails = False
        """Whether the other end takes nothing any more; what it has sent before can still be read."""
        self.backlog: deque[Bytes] = deque()
        """The bytes that the socket has not taken."""
        self._unread = bytearray()
        self._at = 0
        """How many of the bytes that were read belong to messages that were handed out."""

    def send(self, frames: Sequence[Bytes]) -> None:
        """Send a message, or keep what the socket does not take now."""
        if self.fails:
            return
        sizes = [memoryview(frame).nbytes for frame in frames]
        head = struct.pack(f"<{1 + len(frames)}I", len(frames), *sizes)
        if len(frames) == 1:
            self.backlog.append(head + frames[0])
        else:  # of media, which are large, nothing is copied
            self.backlog += [head, *(memoryview(frame).cast("B") for frame in frames if len(frame))]
        self.flush()

    def flush(self) -> None:
        """Write what is kept, as far as the socket takes it."""
        while self.backlog:
            first = self.backlog[0]
            try:
                sent = self.sock.send(first)
            except BlockingIOError:
                return
            except OSError:
                self.fails = True
                self.backlog.clear()
                return
            if sent < len(first):
                self.backlog[0] = memoryview(first)[sent:]
            else:
                self.backlog.popleft()

    def messages(self) -> Iterator[list[bytes]]:
        """The messages that have come, read while they are asked for. `ended` is set behind the last one."""
        drained = False
        while True:
            while (bounds := self._next()) is not None:
                self._at = bounds[-1]
                with memoryview(self._unread) as unread:
                    frames = [bytes(unread[first:end]) for first, end in pairwise(bounds)]
                yield frames
            if self._at:
                del self._unread[: self._at]
                self._at = 0
            if drained or self.ended:
                return
            try:
                data = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.ended, drained = not data, len(data) < _READ_BYTES
            self._unread += data

    @property
    def holds_message(self) -> bool:
        """Whether a message was read and not handed out, so that nothing more may come to tell of it."""
        return bool(self._unread) and self._next() is not None

    def _next(self) -> list[int] | None:
        """Where the first frame of the next message begins, and where each ends; None if some is missing."""
        unread, at = self._unread, self._at
        if len(unread) < at + 4:
            return None
        (count,) = struct.unpack_from("<I", unread, at)
        start = at + 4 + 4 * count
        if len(unread) < start:
            return None
        bounds = [*accumulate(struct.unpack_from(f"<{count}I", unread, at + 4), initial=start)]
        return bounds if bounds[-1] <= len(unread) else None

    def close(self) -> None:
        self.ended = True
        self.sock.close()


class UnixEngineEnd:
    """An engine's connection to an API server of its machine. A thread makes it while nobody listens."""

    def __init__(self, address: Address, engine: int) -> None:
        self.lost = False
        """Whether the server has gone, and no other one has taken its place yet."""
        self._path, self._engine = _path(address), engine
        self._decoder = MessageDecoder(Decoder[Request](Request))
        self._waiting: deque[Bytes] = deque()
        """The messages for the first server, which does not listen yet."""
        self._channel: Channel | None = None
        self._next: socket.socket | None = None
        """A connection to the server that has taken the place of the one that has gone."""
        self._watched: socket.socket | None = None
        """The socket of which the poller tells."""
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self.monitor = self._woken.fileno()
        """What can be read once there are `changes`."""
        self._connector = threading.Thread(target=self._connect, name="connects", daemon=True)
        if not self._try_to_connect():
            self._connector.start()

    @property
    def bad(self) -> int:
        """The messages that could not be read."""
        return self._decoder.bad

    @property
    def backlog(self) -> deque[Bytes]:
        return self._waiting if self._channel is None else self._channel.backlog

    @property
    def holds_message(self) -> bool:
        return self._channel is not None and self._channel.holds_message

    def watch(self, poller: zmq.Poller) -> None:
        """Let the next poll wake when messages come, or when some of the backlog can be sent."""
        channel = self._channel
        sock = None if channel is None or channel.ended else channel.sock
        if self._watched is not None and self._watched is not sock:
            with suppress(KeyError):  # it is another poller
                poller.unregister(self._watched)
        self._watched = sock
        if channel is not None and sock is not None:
            poller.register(sock, zmq.POLLIN | zmq.POLLOUT if channel.backlog else zmq.POLLIN)

    def has_come(self, ready: dict[object, int]) -> bool:
        """Whether messages can be read, as a poll has found."""
        channel = self._channel
        return channel is not None and (channel.sock.fileno() in ready or channel.holds_message)

    def read(self) -> Iterator[Request]:
        """Each message that has come."""
        if (channel := self._channel) is not None:
            for frames in channel.messages():
                if (message := self._decoder.decode(frames)) is not None:
                    yield message
            self._look_at_end()

    def greet(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.send([_encode(Hello(engine=self._engine, protocol=PROTOCOL))])

    def send(self, answer: Answer) -> bool:
        """Send, or keep what cannot be sent now; False if the server has not read for thousands of steps.

        The answer is kept, so that nothing is missing if the server goes on. The caller has to abort the
        server's requests, so that nothing is added. To a server that is gone, nothing is sent.
        """
        with self._lock:
            if self._channel is None:
                self._waiting.append(_encode(answer))
            elif not self._channel.ended:
                self._channel.send([_encode(answer)])
            self._look_at_end()
            return len(self.backlog) < MOST_WAITING

    def flush(self) -> None:
        """Send what can be sent of the backlog."""
        with self._lock:
            if self._channel is not None:
                self._channel.flush()
                self._look_at_end()

    def _look_at_end(self) -> None:
        """Have the loop ask for changes if the server has gone."""
        if self._channel is not None and self._channel.ended and not self.lost:
            self._channel.backlog.clear()
            self._notify()

    def _notify(self) -> None:
        with suppress(OSError):  # it has been told often enough, or everything is closed
            self._wake.send(b".")

    def changes(self) -> Iterator[Literal["lost", "back"]]:
        """The changes since the last call: "lost" if the server ended, "back" if another took its place."""
        with suppress(BlockingIOError):
            self._woken.recv(4096, socket.MSG_DONTWAIT)
        if self._channel is not None and self._channel.ended and not self.lost:
            self.lost = True
            self._channel.close()
            if self._connector.is_alive():
                self._connector.join()
            self._connector = threading.Thread(target=self._connect, name="connects", daemon=True)
            self._connector.start()
            yield "lost"
        if self._next is not None:
            self._channel, self._next, self.lost = Channel(self._next), None, False
            yield "back"

    def _connect(self) -> None:
        while not self._try_to_connect() and not self._closed.wait(RECONNECT_SECONDS):
            pass

    def _try_to_connect(self) -> bool:
        """Connect to the server, and say hello to it if it is the first one."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._path)
        except OSError:  # nobody listens yet
            sock.close()
            return False
        with self._lock:
            if self._channel is not None:
                self._next = sock
            else:
                self._channel = Channel(sock)
                self.greet()
                for message in self._waiting:
                    self._channel.send([message])
                self._waiting.clear()
        self._notify()
        return True

    def wait_until_connected(self, seconds: float) -> None:
        if self._connector.is_alive():
            self._connector.join(seconds)

    def close(self) -> None:
        """End the connection, once what is kept is sent, or has not been for a moment."""
        until = time.monotonic() + LINGER_SECONDS
        self.wait_until_connected(LINGER_SECONDS if self._waiting else 0.0)
        while self._channel is not None and self._channel.backlog:
            if (left := until - time.monotonic()) <= 0:
                break
            select.select([], [self._channel.sock], [], left)
            self.flush()
        self._closed.set()
        for each in (self._channel, self._next, self._woken, self._wake):
            if each is not None:
                each.close()


class UnixServerEnd:
    """An API server's connections to the engines of its machine, read from the event loop's own poll."""

    def __init__(self, address: Address) -> None:
        path = _path(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)  # of a server that has ended
            self._socket.bind(path)
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"cannot listen on {path}: {error.strerror}") from error
        self._socket.listen(_NEWCOMERS)
        self._socket.setblocking(False)
        self._decoder = MessageDecoder(Decoder[Answer](Answer))
        self._channels: dict[Channel, int | None] = {}
        """The engine at the other end of each, once it has said hello."""
        self._newest: dict[int, Channel] = {}
        """The connection of each engine. What still comes on an older one is dropped."""

    def open(self, listener: Listener) -> None:
        self._listener, self._loop = listener, asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # there is no more
                return
            channel = Channel(sock)
            self._channels[channel] = None
            self._loop.add_reader(sock.fileno(), guarded, self._listener, self._follow, channel)

    def has(self, engine: int) -> bool:
        """Whether an engine is connected."""
        return engine in self._newest

    def send(self, engine: int, frames: Sequence[Bytes]) -> None:
        """Send to an engine that is connected. Raises Unreachable if it does not take it."""
        channel = self._newest[engine]
        if len(channel.backlog) > MOST_WAITING:
            raise Unreachable("the engine cannot be reached: it does not read")
        channel.send(frames)
        if channel.fails:
            raise Unreachable("the engine cannot be reached: it has gone")
        if channel.backlog:
            self._loop.add_writer(channel.sock.fileno(), self._flush, channel)

    def _flush(self, channel: Channel) -> None:
        channel.flush()
        if not channel.backlog:
            self._loop.remove_writer(channel.sock.fileno())

    def read(self) -> None:
        """Have the listener hear all answers that have come."""
        for channel in list(self._channels):
            self._hear(channel)

    def _hear(self, channel: Channel) -> None:
        for frames in channel.messages():
            answer = self._decoder.decode(frames)
            if isinstance(answer, Hello):
                self._channels[channel] = answer.engine
                self._newest[answer.engine] = channel
                self._listener.connected(answer)
                self._listener.reachable(answer)
            elif answer is not None:
                engine = self._channels.get(channel)
                if engine is not None and self._newest.get(engine) is channel:
                    self._listener.heard(engine, answer)

    def _follow(self, channel: Channel) -> None:
        """Hear what has come, and note the end of the connection behind it."""
        self._hear(channel)
        if not channel.ended or channel not in self._channels:
            return
        engine = self._channels.pop(channel)
        self._forget(channel)
        if engine is not None and self._newest.get(engine) is channel:
            del self._newest[engine]
            self._listener.disconnected(engine)

    def _forget(self, channel: Channel) -> None:
        self._loop.remove_reader(channel.sock.fileno())
        self._loop.remove_writer(channel.sock.fileno())
        channel.close()

    def discard(self) -> None:
        """Close what was never opened."""
        self._socket.close()

    def close(self) -> None:
        for channel in self._channels:
            self._forget(channel)
        self._channels.clear()
        self._newest.clear()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()


def _path(address: Address) -> str:
    return address.requests.removeprefix("ipc://")
