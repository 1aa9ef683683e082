"""The ranks on other machines, whose nodes connect to the engine, learn their places, and relay frames.

The engine listens on a ROUTER that only those can use who have the cluster key. ZeroMQ's heart-beats end the
connection to a machine that vanishes; a monitor shows that, and trying to send to each node shows which it
was.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import zmq
from msgspec.structs import replace

from engine_core.executor import ReportPhase
from engine_core.wire.sockets import DISCONNECTED, REFUSED, ClusterKeys, socket_events, stop_monitor
from worker.config import Place, WorkerConfig
from worker.ranks.channel import Order, RankFailed, RankMessage

STOP, KILL, PING = b"stop", b"kill", b"ping"

_HEARTBEAT_MS, _TIMEOUT_MS = 500, 3000
_GATHER_MS = 500
_RETRY_MS = 10
_RETRY_SECONDS = 1.0  # between a connection's end and the moment in which its node cannot be reached
_LINGER_MS = 300

_log = logging.getLogger(__name__)


class NodeHello(msgspec.Struct, frozen=True):
    """A node's first message."""

    node: int
    protocol: str
    host: str
    """The name of its machine, for people."""
    address: str
    """The address at which other machines reach it."""
    port: int


class NodeTask(msgspec.Struct, frozen=True):
    """The answer to a NodeHello. The frames that follow are steps for all ranks, PING, and STOP or KILL."""

    config: WorkerConfig
    """The options of all ranks, but for the checkpoint's folder, which is each machine's own."""
    places: list[Place]
    log_level: str


def _digest() -> str:
    types = [NodeHello, NodeTask, Order, RankMessage]
    _, parts = msgspec.json.schema_components(types, schema_hook=lambda kind: {"title": kind.__name__})
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:16]


PROTOCOL = _digest()
"""A digest of all messages: machines whose digests differ refuse each other."""


def guarded_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket whose connections end soon after the machine at the other end vanishes."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.LINGER, _LINGER_MS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TIMEOUT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TTL, _TIMEOUT_MS)
    return sock


class RemoteRanks:
    """The ranks of all nodes, each of which is a machine or a part of one."""

    def __init__(
        self,
        host: str,
        port: int | None,
        keys: ClusterKeys,
        nodes: Mapping[int, Sequence[Place]],
        report: ReportPhase,
    ) -> None:
        """Listens on an address of this machine; without a port, on a free one, which `port` names."""
        self._nodes = nodes
        self._report = report
        self._hellos: dict[int, NodeHello] = {}
        self._gone: set[int] = set()
        self._refused = False
        """Whether the next DISCONNECTED is of a connection that was refused."""
        self._warned = False
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = guarded_socket(self._context, zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        keys.guard(self._router)
        self._monitor = self._router.get_monitor_socket(DISCONNECTED | REFUSED)
        try:
            self.port = _bind(self._router, host, port)
        except OSError:
            self._close()
            raise

    def start(self, config: WorkerConfig, log_level: str) -> None:
        self.gather()
        self.begin(config, log_level)

    def gather(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all nodes are connected. `check` is called now and then, and may raise."""
        reported = None
        while missing := [node for node in self._nodes if node not in self._hellos]:
            waiting = f"waiting for node {', '.join(map(str, missing))} of {', '.join(map(str, self._nodes))}"
            if waiting != reported:
                _log.info(waiting)
                self._report("import", 0.0, waiting)
                reported = waiting
            check()
            if self._router.poll(_GATHER_MS):
                self._greet(*self._router.recv_multipart())
            for node in self._lost():
                _log.warning("node %d (%s) has left again", node, self._hellos.pop(node).host)

    def begin(self, config: WorkerConfig, log_level: str) -> None:
        for node, places in self._nodes.items():
            known = [self._with_addresses(place, self._hellos[node]) for place in places]
            self._send(node, self._encoder.encode(NodeTask(config, known, log_level)))

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def send(self, frame: bytes) -> None:
        for node in self._hellos:
            self._send(node, frame)

    def receive(self) -> Iterator[tuple[int, bytes]]:
        lost = self._lost()
        while self._router.poll(0):
            _, *parts = self._router.recv_multipart()
            if len(parts) == 2:  # a second hello is ignored
                yield int(parts[0]), parts[1]
        for node in lost:
            failed = RankFailed("the connection to its machine is lost", time.time(), unreported=True)
            for place in self._nodes[node]:
                yield place.rank, self._encoder.encode(failed)
            self._gone.add(node)

    def host(self, rank: int) -> str:
        for node, hello in self._hellos.items():
            if any(place.rank == rank for place in self._nodes[node]):
                return hello.host
        return ""

    def stop(self, *, by_force: bool) -> None:
        self.send(KILL if by_force else STOP)
        self._close()

    def _close(self) -> None:
        stop_monitor(self._router, self._monitor)
        self._router.close()
        self._context.term()

    def _greet(self, name: bytes, frame: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(frame, type=NodeHello)
        except msgspec.DecodeError as error:
            raise ValueError(f"{name.decode(errors='replace')} runs another version of Facet") from error
        if hello.protocol != PROTOCOL:
            raise ValueError(f"node {hello.node} ({hello.host}) runs another version of Facet")
        if hello.node not in self._nodes:
            expected = ", ".join(map(str, self._nodes))
            _log.warning("%s calls itself node %d: only %s can join", hello.host, hello.node, expected)
            return
        self._hellos[hello.node] = hello
        _log.info("node %d is %s (%s)", hello.node, hello.host, hello.address)

    def _with_addresses(self, place: Place, here: NodeHello) -> Place:
        """The place, completed by what its node has sent: addresses, and how many ranks share its machine."""
        first = self._hellos[min(self._nodes)]
        sharing = [node for node, hello in self._hellos.items() if hello.address == here.address]
        return replace(
            place,
            rendezvous=place.rendezvous or f"tcp://{first.address}:{first.port}",
            address=here.address,
            local_ranks=max(place.local_ranks, sum(len(self._nodes[node]) for node in sharing)),
        )

    def _send(self, node: int, frame: bytes) -> bool:
        """Send a frame to a node; False if the node cannot be reached."""
        try:
            self._router.send_multipart([node_name(node), frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _lost(self) -> list[int]:
        if not self._any_disconnected():
            return []
        deadline = time.monotonic() + _RETRY_SECONDS
        while time.monotonic() < deadline:
            lost = [node for node in self._hellos if node not in self._gone and not self._send(node, PING)]
            if lost:
                return lost
            self._router.poll(_RETRY_MS)
        return []

    def _any_disconnected(self) -> bool:
        """Whether a connection has ended that was not refused from the start."""
        found = False
        for event, _ in socket_events(self._monitor):
            found |= event == DISCONNECTED and not self._refused
            self._refused = event != DISCONNECTED
            if self._refused and not self._warned:
                self._warned = True  # once: a refused node tries again many times
                _log.warning("a connection was refused: is the cluster key the same on all machines?")
        return found


def node_name(node: int) -> bytes:
    return b"node-%d" % node


def _bind(sock: zmq.Socket[bytes], host: str, port: int | None) -> int:
    try:
        sock.bind(f"tcp://{socket.gethostbyname(host)}:{port or '*'}")
    except (OSError, zmq.ZMQError) as error:
        unknown = isinstance(error, socket.gaierror)  # whose numbers are not those of other errors
        reason = error.strerror if unknown else os.strerror(error.errno or 0)
        raise OSError(
            f"cannot listen on {host}:{port or 'any port'} ({reason}): --master-addr "
            "has to be an address of this machine, and --master-port a free port"
        ) from error
    return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
