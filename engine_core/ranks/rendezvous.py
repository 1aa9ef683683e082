"""Connects engines that share experts before their ranks start, on one machine or on several.

On several the first engine listens, and the others come to it. Both ends of each connection prove that they
have the cluster's key; then all learn each other's addresses, and are connected each with each.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import select
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from engine_core.config import ProcessConfig
from engine_core.executor import ExecutorDead, OtherEngineDead, ReportPhase
from engine_core.ranks.peers import keep_alive
from worker.ranks.unix_sockets import RankLostError, connect_all

_LOCAL_SECONDS = 600.0
"""The longest time that an engine waits for others of its machine."""
_LOOK_SECONDS, _RETRY_SECONDS = 0.5, 0.3
_ANSWER_SECONDS = 5.0
"""The time for whoever connects to prove that it has the key."""
_MESH_SECONDS = 60.0
"""The time for engines that know each other to be connected each with each."""
_NONCE_BYTES, _TAG_BYTES, _LENGTH_BYTES = 32, 32, 4
_MOST_BYTES = 1 << 20
"""The most bytes of a message of those that meet."""

_log = logging.getLogger(__name__)

Message = TypeVar("Message")


@dataclass(frozen=True)
class Rendezvous:
    """The other engines that an engine has met: their addresses, and its connections to them."""

    sockets: Mapping[int, socket.socket] = field(default_factory=dict[int, socket.socket])
    """The number of each other engine, and the connection to it, which never blocks."""
    rendezvous: str = ""
    """The address at which the ranks of all can meet: another one at each start."""
    address: str = ""
    """The address of this machine for the others, if some are elsewhere."""


class RendezvousHello(msgspec.Struct, frozen=True):
    """The first message of an engine to another one."""

    number: int
    size: int
    """How many engines share experts, as it knows."""
    port: int = 0
    """The port at which it listens for those of higher numbers, at the address from which it calls."""


class Table(msgspec.Struct, frozen=True):
    """The answer of the first engine, once all have come."""

    addresses: dict[int, tuple[str, int]]
    """The address and the port at which each of the other engines listens."""
    rendezvous: str
    refusal: str = ""
    """Why an engine may not take part, if so."""


def meet(process: ProcessConfig, report: ReportPhase) -> Rendezvous:
    """Wait until all engines have come that share experts with this one. Raises ExecutorDead."""
    replicas = process.replicas
    try:
        if len(replicas.local) == replicas.size:
            return _on_this_machine(process)
        key = _key_of(replicas.secret or "")
        here = replicas.address, replicas.port - 1
        if process.index == 0:
            return _Host(here, key, replicas.size, report).meet()
        return _Guest(here, key, process.index, replicas.size, report).meet()
    except ExecutorDead:  # whose reason is here, and not with another engine
        raise
    except (RankLostError, OSError) as error:
        raise OtherEngineDead(f"engines that share experts have not met: {error}") from error


def _key_of(secret: str) -> bytes:
    return hashlib.sha256(f"facet engines' key\0{secret}".encode()).digest()


def _on_this_machine(process: ProcessConfig) -> Rendezvous:
    prefix, size = f"{process.folder}/joint-{process.generation}", process.expert_replicas
    folder = Path(process.folder or "", f"experts-{process.generation}")
    folder.mkdir(mode=0o700, exist_ok=True)
    sockets = connect_all(prefix, process.index, size, _LOCAL_SECONDS)
    return Rendezvous(sockets, f"file://{folder}/m")  # short, because it begins the paths of sockets


class _Line:
    """A connection whose two ends have the same key."""

    def __init__(self, sock: socket.socket, key: bytes, *, calls: bool) -> None:
        """`calls`: whether this end has called, and so speaks first."""
        sock.settimeout(_ANSWER_SECONDS)
        own = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(own)
        other = _exactly(sock, _NONCE_BYTES)
        both = own + other if calls else other + own
        self.socket = sock
        self._key = hmac.digest(key, both, "sha256")
        self._calls = calls
        self._sent = self._received = 0

    def send(self, message: object) -> None:
        frame = msgspec.msgpack.encode(message)
        tag = self._tag(frame, self._sent, by_caller=self._calls)
        self._sent += 1
        self.socket.sendall(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame + tag)

    def receive(self, kind: type[Message]) -> Message:
        """The next message. Raises OSError if none comes, or its sender does not have the key."""
        length = int.from_bytes(_exactly(self.socket, _LENGTH_BYTES), "little")
        if length > _MOST_BYTES:
            raise ConnectionError("it is not an engine, or of another version")
        frame, tag = _exactly(self.socket, length), _exactly(self.socket, _TAG_BYTES)
        if not hmac.compare_digest(tag, self._tag(frame, self._received, by_caller=not self._calls)):
            raise PermissionError("the other machine has another cluster key: set the same one on all")
        self._received += 1
        try:
            return msgspec.msgpack.decode(frame, type=kind)
        except msgspec.DecodeError as error:
            raise ConnectionError("the engine there is of another version") from error

    @property
    def is_open(self) -> bool:
        """Whether the other end is still there, as far as is known here."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        if not poller.poll(0):
            return True
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _tag(self, frame: bytes, number: int, *, by_caller: bool) -> bytes:
        return hmac.digest(self._key, bytes([by_caller, number]) + frame, "sha256")


class _Host:
    """The first engine, to which all others come."""

    def __init__(self, here: tuple[str, int], key: bytes, size: int, report: ReportPhase) -> None:
        self._here, self._key, self._size = here, key, size
        self._report = report
        self._lines: dict[int, _Line] = {}
        self._addresses: dict[int, tuple[str, int]] = {}

    def meet(self) -> Rendezvous:
        with _listener(*self._here) as listener:
            listener.settimeout(_LOOK_SECONDS)
            told = None
            while missing := [number for number in range(1, self._size) if number not in self._lines]:
                if missing != told:
                    told = missing
                    _say(f"waiting for engine {', '.join(map(str, missing))} of other machines", self._report)
                with suppress(TimeoutError):
                    self._greet(*listener.accept())
                for number in [number for number, line in self._lines.items() if not line.is_open]:
                    _log.warning("engine %d has left again", number)
                    self._lines.pop(number).socket.close()
            own: str = listener.getsockname()[0]
        rendezvous = f"tcp://{_in_url(own)}:{free_port(own)}"
        for line in self._lines.values():
            line.send(Table(self._addresses, rendezvous))
        return Rendezvous(_made_ready(self._lines), rendezvous, own)

    def _greet(self, sock: socket.socket, whence: tuple[str, int]) -> None:
        try:
            line = _Line(sock, self._key, calls=False)
            hello = line.receive(RendezvousHello)
            if hello.size != self._size or not 0 < hello.number < self._size:
                refusal = f"engine 0 is one of {self._size} that share experts: give all the same sizes"
                line.send(Table({}, "", refusal))
                raise ConnectionError(f"engine {hello.number} of {hello.size} is none of {self._size}")
        except OSError as error:
            _log.warning("a connection from %s was refused: %s", whence[0], error)
            sock.close()
            return
        if (before := self._lines.get(hello.number)) is not None:
            before.socket.close()
        self._lines[hello.number], self._addresses[hello.number] = line, (whence[0], hello.port)
        _log.info("engine %d has come from %s", hello.number, whence[0])


class _Guest:
    """Another engine, which comes to the first."""

    def __init__(
        self, host: tuple[str, int], key: bytes, number: int, size: int, report: ReportPhase
    ) -> None:
        self._host, self._key, self._report = host, key, report
        self._hello = RendezvousHello(number, size)

    def meet(self) -> Rendezvous:
        _say(f"waiting for engine 0 at {self._host[0]}", self._report)
        while True:
            try:
                sock = socket.create_connection(self._host, _ANSWER_SECONDS)
            except OSError as error:
                if isinstance(error, socket.gaierror):
                    raise
                time.sleep(_RETRY_SECONDS)  # it does not listen yet
                continue
            with ExitStack() as opened:
                opened.enter_context(sock)
                own: str = sock.getsockname()[0]
                listener = opened.enter_context(_listener(own, 0))
                first = self._call(sock, listener.getsockname()[1])
                _say("waiting for engines of other machines", self._report)
                sock.settimeout(None)
                keep_alive(sock)
                table = first.receive(Table)
                if table.refusal:
                    raise ExecutorDead(table.refusal)
                lines = {0: first, **self._mesh(table, listener)}
                listener.close()
                opened.pop_all()
            return Rendezvous(_made_ready(lines), table.rendezvous, own)

    def _call(self, sock: socket.socket, port: int = 0) -> _Line:
        line = _Line(sock, self._key, calls=True)
        line.send(RendezvousHello(self._hello.number, self._hello.size, port))
        return line

    def _mesh(self, table: Table, listener: socket.socket) -> dict[int, _Line]:
        """The connections to all others but the first: this engine calls those of lower numbers."""
        number, lines = self._hello.number, dict[int, _Line]()
        until = time.monotonic() + _MESH_SECONDS
        for other in range(1, number):
            lines[other] = self._call(socket.create_connection(table.addresses[other], _MESH_SECONDS))
        while len(lines) < self._hello.size - 2:
            listener.settimeout(max(0.01, until - time.monotonic()))
            sock, whence = listener.accept()
            try:
                line = _Line(sock, self._key, calls=False)
                lines[line.receive(RendezvousHello).number] = line
            except OSError as error:
                _log.warning("a connection from %s was refused: %s", whence[0], error)
                sock.close()
        return lines


def _say(waiting: str, report: ReportPhase) -> None:
    _log.info(waiting)
    report("import", 0.0, waiting)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ExecutorDead(
            f"cannot listen at {host}:{port} ({error.strerror}): --data-parallel-address has to be an "
            "address of the machine that runs replica 0, and the port before --data-parallel-rpc-port free"
        ) from error


def free_port(address: str) -> int:
    with _listener(address, 0) as probe:
        port: int = probe.getsockname()[1]
        return port


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _made_ready(lines: Mapping[int, _Line]) -> dict[int, socket.socket]:
    """Connections as rounds need them: messages leave at once, and the end of a machine is noticed."""
    sockets = {number: line.socket for number, line in lines.items()}
    for sock in sockets.values():
        keep_alive(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return sockets


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = sock.recv(count - len(found))
        if not part:
            raise ConnectionError("the other end has closed the connection: is its cluster key the same?")
        found += part
    return bytes(found)
