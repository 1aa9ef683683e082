"""Carries messages between an API server's client and its engines through sockets, from the event loop's own
poll: no task, lock or queue per token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from engine_core import protocol
from engine_core.config import Address
from engine_core.wire.transport import ServerEnd, Unreachable

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """A client, as a link calls it with the messages of engines."""

    def reachable(self, hello: protocol.Hello) -> None:
        """Note that requests can be sent to an engine from now on."""
        ...

    def connected(self, hello: protocol.Hello) -> None:
        """Note that answers come from an engine: a new one, one in another's place, or the same one again."""
        ...

    def heard(self, number: int, answer: protocol.Answer) -> None:
        """Take an answer of the engine of this number."""
        ...

    def disconnected(self, number: int) -> None:
        """Note that the connection of an engine has ended, whose answers are all heard."""
        ...

    def welcome(self) -> protocol.Welcome:
        """What a machine is told that wants to start engines."""
        ...

    def misheard(self) -> None:
        """Note that an answer could not be handled, so that a request may wait for ever."""
        ...


class Link(Protocol):
    """Carries messages to engines, and their answers to the listener with which it is opened."""

    def open(self, listener: Listener) -> None: ...

    def send(self, number: int, request: protocol.Request) -> None:
        """Send to the engine of a number. Raises Unreachable or RequestTooLarge."""
        ...

    def read(self) -> None:
        """Have the listener hear all answers that have come."""
        ...

    def close(self) -> None: ...


class SocketLink:
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

    def send(self, number: int, request: protocol.Request) -> None:
        self._end.send(number, request)
        self._read_greetings()  # sending may clear the socket's one notice that something can be read

    def read(self) -> None:
        for number, answer in self._end.read_answers():
            if isinstance(answer, protocol.Hello):
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
            if isinstance(greeting, protocol.Hello):
                self._listener.reachable(greeting)
                continue
            with suppress(Unreachable):  # the machine that wants to join has gone again
                self._end.welcome(frame.bytes, self._listener.welcome())

    def _read_monitor(self) -> None:
        self.read()  # its last answers came before its end
        for number in self._end.disconnected():
            self._listener.disconnected(number)
