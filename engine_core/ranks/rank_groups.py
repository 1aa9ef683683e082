"""The ranks on this machine, each in a process of its own, and those on others, whose nodes connect to the
engine, learn their places, and relay frames.

Frames pass through unread, so that an engine and a machine that only relays for one use the same class for
the ranks beside them. For nodes the engine listens on a ROUTER that only those can use who have the cluster
key. ZeroMQ's heart-beats end the connection to a machine that vanishes; a monitor shows that, and trying to
send to each node shows which it was.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import zmq
from msgspec.structs import replace

from engine_core.executor import ReportPhase
from engine_core.wire.sockets import DISCONNECTED, REFUSED, ClusterKeys, socket_events, stop_monitor
from worker import child
from worker.buffers import Bytes
from worker.config import Place, WorkerConfig
from worker.ranks.channel import EngineEnd, Order, RankFailed, RankMessage, RankStart

_STOP_SECONDS = 2.0
_EXIT_SECONDS = 1.0  # between the end of a channel and that of its process

_encoder = msgspec.msgpack.Encoder()


class LocalRanks:
    """Starts the rank processes of these places, which meet in a folder if nowhere else; talks to them."""

    def __init__(
        self,
        places: Sequence[Place],
        module: str = "worker.rank_process",
        folder: str | None = None,
        progress_page: str = "",
    ) -> None:
        """`module` is what `python -m` runs. `folder`: where the rendezvous is made, if not in /tmp.

        `progress_page` is the engine's, whose first entry is its own; ranks get the next ones.
        """
        self._places = places
        self._progress_page = progress_page
        self._module = module
        self._parent_folder = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: dict[int, child.Child] = {}
        self._channels: dict[int, EngineEnd] = {}

    def start(self, config: WorkerConfig, log_level: str) -> None:
        for place in self._places:
            self._start(replace(config, place=self._with_rendezvous(place)), log_level)

    def register(self, poller: zmq.Poller) -> None:
        for channel in self._channels.values():
            flags = zmq.POLLIN | zmq.POLLOUT if channel.has_unsent else zmq.POLLIN
            poller.register(channel, 0 if channel.ended else flags)

    def send(self, frames: Sequence[Bytes], later: Sequence[Bytes] | None = None) -> None:
        first = {place.rank for place in self._places if place.stage == 0}
        for rank, channel in self._channels.items():
            channel.write(frames if rank in first or later is None else later)

    def receive(self) -> Iterator[tuple[int, bytes]]:
        for rank, channel in self._channels.items():
            if channel.ended:
                continue
            channel.flush()
            for frame in channel.read():
                yield rank, frame
            if channel.ended:
                failed = RankFailed(_describe_end(self._processes[rank]), time.time(), unreported=True)
                yield rank, _encoder.encode(failed)

    def host(self, rank: int) -> str:
        return ""

    def stop(self, *, by_force: bool) -> None:
        for channel in self._channels.values():
            channel.close()
        deadline = time.monotonic() + (0 if by_force else _STOP_SECONDS)
        for process in self._processes.values():
            if not process.ended_within(max(0.0, deadline - time.monotonic())):
                process.kill()
        for process in self._processes.values():
            process.wait()
        self._channels.clear()
        self._processes.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _with_rendezvous(self, place: Place) -> Place:
        if place.rendezvous or place.size == 1:
            return place
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="facet-", dir=self._parent_folder)  # mode 0700
        return replace(place, rendezvous=f"file://{self._folder.name}/rendezvous")

    def _start(self, config: WorkerConfig, log_level: str) -> None:
        rank = config.place.rank
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            entry = 1 + len(self._processes)
            start = RankStart(config, descriptor, log_level, self._progress_page, entry)
            payload = _encoder.encode(start)
            self._processes[rank] = child.start(f"rank {rank}", self._module, payload, inherit=[descriptor])
        self._channels[rank] = EngineEnd(ours)


def _describe_end(process: child.Child) -> str:
    """A clause on how a rank ended whose channel has ended."""
    if not process.ended_within(_EXIT_SECONDS):
        return "it does not listen any more"
    return child.describe_exit(process.wait())


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
            self._send(node, _encoder.encode(NodeTask(config, known, log_level)))

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def send(self, frames: Sequence[Bytes], later: Sequence[Bytes] | None = None) -> None:
        """Send a message to each node, whole if any of the ranks to which it is relayed needs that."""
        for node in self._hellos:
            encodes = any(place.stage == 0 for place in self._nodes[node])
            self._send(node, *(frames if encodes or later is None else later))

    def receive(self) -> Iterator[tuple[int, bytes]]:
        lost = self._lost()
        while self._router.poll(0):
            _, *parts = self._router.recv_multipart()
            if len(parts) == 2:  # a second hello is ignored
                yield int(parts[0]), parts[1]
        for node in lost:
            failed = RankFailed("the connection to its machine is lost", time.time(), unreported=True)
            for place in self._nodes[node]:
                yield place.rank, _encoder.encode(failed)
            self._gone.add(node)

    def host(self, rank: int) -> str:
        for node, hello in self._hellos.items():
            if any(place.rank == rank for place in self._nodes[node]):
                return hello.host
        return ""

    def stop(self, *, by_force: bool) -> None:
        self.send([KILL if by_force else STOP])
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

    def _send(self, node: int, *frames: Bytes) -> bool:
        """Send a message to a node; False if the node cannot be reached."""
        try:
            self._router.send_multipart([node_name(node), *frames], zmq.NOBLOCK, copy=False)
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
