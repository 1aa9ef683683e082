"""Chooses how messages travel between API servers and engines: by Unix sockets, or by ZMQ to other machines.

An API server's client reads its sockets from the event loop's own poll (`SocketLink`): no task, lock or queue
per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import zmq

from engine_core.config import Address
from engine_core.protocol import Hello, Request
from engine_core.wire.transport import (
    EngineEnd,
    Listener,
    ServerEnd,
    Unreachable,
    frames_of,
    guarded,
)
from engine_core.wire.unix_sockets import UnixEngineEnd, UnixServerEnd
from worker.buffers import Bytes, Encoder


def open_engine_end(
    context: zmq.Context[zmq.Socket[bytes]], address: Address, engine: int
) -> EngineEnd | UnixEngineEnd:
    """Connect an engine to an API server."""
    return UnixEngineEnd(address, engine) if address.is_local else EngineEnd(context, address, engine)


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
        self._encoder = Encoder()
        self._local = UnixServerEnd(address) if address.is_local else None
        remote = tcp_address if address.is_local else address
        try:
            self._remote = None if remote is None else RemoteLink(ServerEnd(remote))
        except OSError:
            if self._local is not None:
                self._local.discard()
            raise

    def open(self, listener: Listener) -> None:
        for end in (self._local, self._remote):
            if end is not None:
                end.open(listener)

    def send(self, number: int, request: Request) -> None:
        frames = frames_of(request, self._encoder)
        if self._local is not None and self._local.has(number):
            self._local.send(number, frames)
        elif self._remote is not None:
            self._remote.send(number, frames)
        else:
            raise Unreachable("the engine cannot be reached: it is not connected")

    def read(self) -> None:
        for end in (self._local, self._remote):
            if end is not None:
                end.read()

    def close(self) -> None:
        for end in (self._local, self._remote):
            if end is not None:
                end.close()


class RemoteLink:
    """Carries messages to the engines of other machines, and their answers."""

    def __init__(self, end: ServerEnd) -> None:
        self._end = end
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
            self._loop.add_reader(descriptor, guarded, listener, read)
            read()  # a descriptor of ZMQ wakes only for what comes after the socket was found empty

    def send(self, number: int, frames: Sequence[Bytes]) -> None:
        self._end.send(number, frames)
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
