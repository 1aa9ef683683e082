"""The connections between engines that share experts, through which they agree on rounds of steps."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from struct import Struct

import zmq

from engine_core.executor import ExecutorDead, OtherEngineDead
from worker.buffers import Bytes
from worker.config import WorkerConfig

_MESSAGE = Struct("<qqd")
"""A round, the tokens that the sender computes in it, and the seconds within which that usually ends."""
_LAST_STEPS = 8
"""More steps than may be under way at the same time."""
_LEAVING = -1
"""The number in place of a round with which an engine says that it has nothing to do and wants to end."""
_IDLE_SECONDS, _PROBES = 3, 3
"""A machine that vanishes is noticed after some seconds of silence, and so many probes."""


class Peers:
    """The connections to the other engines, which are read and written without waiting."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        """`sockets`: the number of each other engine, and the connection to it."""
        self._peers = {number: _Peer(number, sockets[number]) for number in sorted(sockets)}
        self._leaves = False

    @property
    def announced(self) -> int:
        return max((peer.announced for peer in self._peers.values()), default=0)

    @property
    def slowest(self) -> float:
        """The seconds of the longest of the last steps that any of them has announced."""
        return max((max(peer.seconds) for peer in self._peers.values() if peer.seconds), default=0.0)

    @property
    def all_leave(self) -> bool:
        return all(peer.leaves for peer in self._peers.values())

    @property
    def first_leaves(self) -> bool:
        """Whether the engine of the lowest number wants to end, if it is another one."""
        first = next(iter(self._peers.values()), None)
        return first is not None and first.number == 0 and first.leaves

    def announce(self, number: int, tokens: int, seconds: float) -> None:
        self._send(_MESSAGE.pack(number, tokens, seconds))

    def leave(self) -> None:
        """Say that this engine wants to end. It goes on taking part until all others do."""
        if not self._leaves:
            self._leaves = True
            self._send(_MESSAGE.pack(_LEAVING, 0, 0.0))

    def take_round(self) -> dict[int, int] | None:
        """Each engine's tokens of the oldest round not taken yet; None unless all have announced it."""
        if not all(peer.tokens for peer in self._peers.values()):
            return None
        return {number: peer.tokens.popleft() for number, peer in self._peers.items()}

    def receive(self) -> None:
        """Read all that has come. Raises OtherEngineDead if an engine has ended that others need."""
        for peer in self._peers.values():
            peer.receive()
            if peer.ended and not (peer.leaves and self._leaves):
                raise _lost(peer.number)

    def register(self, poller: zmq.Poller) -> None:
        """Let the next poll wake when another engine has announced something, or has ended."""
        for peer in self._peers.values():
            poller.register(peer.socket, 0 if peer.ended else zmq.POLLIN)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.socket.close()

    def _send(self, message: bytes) -> None:
        """Send a message to all. It fits, because nobody is many rounds ahead of another."""
        for peer in self._peers.values():
            try:
                whole = peer.socket.send(message) == len(message)
            except OSError as error:
                raise _lost(peer.number) from error
            if not whole:
                raise _lost(peer.number)


class _Peer:
    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.socket = sock
        self.announced = 0
        self.tokens: deque[int] = deque()
        """Its tokens of the rounds that are not taken yet."""
        self.seconds: deque[float] = deque(maxlen=_LAST_STEPS)
        """The seconds of its last steps, some of which may be under way."""
        self.leaves = False
        self.ended = False
        self._received = bytearray()

    def receive(self) -> None:
        """Read all that has come; `ended` says afterwards whether nothing more can."""
        try:
            while not self.ended:
                part = self.socket.recv(1 << 16)
                self._received += part
                self.ended = not part
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        whole = len(self._received) // _MESSAGE.size * _MESSAGE.size
        for number, tokens, seconds in _MESSAGE.iter_unpack(self._received[:whole]):
            self._note(number, tokens, seconds)
        del self._received[:whole]

    def _note(self, number: int, tokens: int, seconds: float) -> None:
        if number == _LEAVING:
            self.leaves = True
            return
        if number != self.announced + 1:
            raise ExecutorDead(f"engine {self.number} announced step {number} after {self.announced}")
        self.announced = number
        self.tokens.append(tokens)
        self.seconds.append(seconds)


def _lost(number: int) -> OtherEngineDead:
    return OtherEngineDead(f"engine {number}, which shares experts with this one, has ended")


def keep_alive(sock: socket.socket) -> None:
    """Let the system notice when the machine at the other end of a connection has vanished."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_IDLE_SECONDS + _PROBES))


class OtherEngines:
    """The other engines, for whoever waits for ranks of this one: if one ends, these wait in vain."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def start(self, config: WorkerConfig, log_level: str) -> None:
        """Do nothing: they are there."""

    def register(self, poller: zmq.Poller) -> None:
        self._peers.register(poller)

    def send(self, frames: Sequence[Bytes], later: Sequence[Bytes] | None = None) -> None:
        """Send nothing: they have ranks of their own."""

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Read what has come; nothing of it is of a rank. Raises OtherEngineDead."""
        self._peers.receive()
        return iter(())

    def host(self, rank: int) -> str:
        return ""

    def stop(self, *, by_force: bool) -> None:
        """Do nothing: they end by themselves."""
