"""The API server's side of its engines: submit a request, read its stream, know which engines live.

It runs in one event loop and reads the sockets from that loop's own poll: no task, lock or queue per token.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypedDict, Unpack

from engine_core.client.dispatcher import Dispatcher
from engine_core.client.in_flight import InFlight
from engine_core.client.replica import Replica
from engine_core.client.replica_table import ReplicaTable
from engine_core.client.streams import Stream
from engine_core.config import Address, Replicas
from engine_core.protocol import (
    PHASES,
    PROTOCOL,
    Add,
    Answer,
    Dead,
    Drain,
    Hello,
    Join,
    Leaving,
    Outputs,
    Pooled,
    Progress,
    Ready,
    Request,
    ResetPrefixCache,
    Stats,
    Tokens,
    Welcome,
)
from engine_core.wire.transport import ServerEnd, Unreachable
from worker.child import BROKE, CANNOT_START, describe_exit
from worker.protocol import Pooling, Sampling

_log = logging.getLogger(__name__)


class AddOptions(TypedDict, total=False):
    """The optional fields of `Add`, by which a caller says how the engine shall treat a request."""

    priority: int
    salt: str
    group: int
    streams: bool
    times_each: bool
    diagnoses: bool


class EngineClient:
    """The engines of one model, as one. Create it in the event loop that will use it.

    The event `folder_known` is set once `folder` is known, `ready_or_dead` once an engine is ready or all are
    dead, and `died` once all are dead, which sets all three. An engine that dies while others live ends only
    the requests that it had begun; others take over the rest.
    """

    def __init__(
        self,
        address: Address,
        replicas: Replicas = Replicas(),
        *,
        server: int = 0,
        servers: int = 1,
        watched: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """`replicas` are all engines, and this is one of so many `servers` that send them requests.

        `watched`: the engines of this machine are children of this process, which calls `engine_exited` when
        one ends. Otherwise an engine counts as ended when its connection has ended.
        """
        self.dead: str | None = None
        """The reason why no replica is left, if none is."""
        self.explained = False
        """Whether the engine whose end is `dead` has printed the reason itself."""
        self.folder = ""
        """The checkpoint's folder on this machine, once it is known."""
        self.folder_known = asyncio.Event()
        self.ready_or_dead = asyncio.Event()
        self.died = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        """A function that is called when `ready` has changed."""
        self._servers = servers
        self._watched = watched
        self._on_progress = on_progress
        self._table = ReplicaTable(replicas, servers)
        self._dispatcher = Dispatcher(self._table, self._send)
        # Not from 0: answers meant for a server that crashed must not fit requests of the one in its place.
        self._last_id = secrets.randbits(48)
        self._loop = asyncio.get_running_loop()
        self._end = ServerEnd(address, replicas.tcp_address(server) if replicas.elsewhere else None)
        self._readers = {
            self._end.greetings.sock.FD: self._read_greetings,
            self._end.answers.sock.FD: self._read_answers,
            self._end.monitor.FD: self._read_monitor,
        }
        for descriptor, read in self._readers.items():
            self._loop.add_reader(descriptor, read)
            read()  # a descriptor of ZMQ wakes only for what comes after the socket was found empty

    @property
    def ready(self) -> Ready | None:
        """The facts of all replicas that work, as of one engine."""
        return self._table.ready

    @property
    def progress(self) -> Progress:
        return self._table.progress

    @property
    def stats(self) -> Stats | None:
        """The statistics of all replicas together."""
        return self._table.stats

    @property
    def replicas(self) -> list[Replica]:
        """The replicas of this machine, and those that have called from others."""
        return list(self._table.replicas.values())

    @property
    def open_streams(self) -> int:
        return len(self._dispatcher)

    # Requests.

    def submit(
        self,
        tokens: list[int],
        params: Sampling,
        *,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> Stream[Tokens]:
        """Send a request, to one replica if it is named. The stream ends with exactly one terminal answer."""
        add = Add(id=self.new_number(), tokens=tokens, params=params, sent=self._now(), **options)
        stream: Stream[Tokens] = Stream(add.id, self._loop)
        self._dispatcher.dispatch([InFlight(add, stream, replica)])
        return stream

    def submit_many(
        self,
        requests: Iterable[tuple[list[int], Pooling]],
        *,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> list[Stream[Pooled]]:
        """Send many requests for vectors, in few frames. Each stream has one answer."""
        sent = self._now()
        adds = [
            Add(id=self.new_number(), tokens=tokens, params=params, sent=sent, **options)
            for tokens, params in requests
        ]
        streams = [Stream[Pooled](add.id, self._loop, pools=True) for add in adds]
        pairs = zip(adds, streams, strict=True)
        self._dispatcher.dispatch([InFlight(add, stream, replica) for add, stream in pairs])
        return streams

    def new_number(self) -> int:
        """A number that no request and no group of this server has had."""
        self._last_id += 1
        return self._last_id

    def _now(self) -> float:
        """The time on the clock that all engines share, or 0 if some run on other machines."""
        return 0.0 if self._table.layout.elsewhere else time.monotonic()

    def abort(self, ids: Iterable[int]) -> None:
        """End these requests, with finish "abort" or Failed. Those that have ended are passed over."""
        self._dispatcher.abort(ids)

    def drain(self, seconds: float) -> None:
        """Let the engines finish what they have, within that time, and end."""
        self._notify_all(Drain(seconds=seconds))

    def reset_prefix_cache(self) -> None:
        self._table.forget_prefixes()
        self._notify_all(ResetPrefixCache())

    # Engines end.

    def engine_exited(self, number: int, code: int) -> None:
        """Note that the process of an engine on this machine has exited. A reason it gave itself counts."""
        if self.dead is None:
            self._read_answers()
            self._lose_process(number, f": {describe_exit(code)}", explained=code in (BROKE, CANNOT_START))

    def all_engines_exited(self) -> None:
        """Note that the processes of all engines on this machine have exited."""
        self._read_monitor()
        for number in self._table.layout.local:
            self._lose_process(number)

    def _lose_process(self, number: int, how: str = "", *, explained: bool = False) -> None:
        if (replica := self._table.replicas.get(number)) is not None:
            doing = PHASES[replica.progress.phase]
            self._lose(number, f"the engine process ended while {doing}{how}", explained=explained)

    def _lose(self, number: int, reason: str, *, explained: bool = False) -> None:
        replica = self._table.replicas.get(number)
        if replica is None or replica.lost is not None or self.dead is not None:
            return
        self._table.lose(replica, reason)
        if self._table.all_lost:
            self.explained = explained
            self.fail(reason)
            return
        _log.error("replica %d has ended: %s", number, reason)
        self._refresh()
        self._dispatcher.reassign(replica)

    def fail(self, reason: str) -> None:
        """End every open stream, because no engine is left. The first reason counts."""
        if self.dead is not None:
            return
        self.dead = reason
        self._dispatcher.close(reason)
        for event in (self.folder_known, self.ready_or_dead, self.died):
            event.set()

    def close(self) -> None:
        self.fail("the server has stopped")
        for descriptor in self._readers:
            self._loop.remove_reader(descriptor)
        self._readers.clear()
        self._end.close()

    # Messages to an engine.

    def _send(self, number: int, request: Request) -> None:
        self._end.send(number, request)
        self._read_greetings()  # sending may clear the socket's one notice that something can be read

    def _notify_all(self, request: Request) -> None:
        for replica in self.replicas:
            self._dispatcher.notify(replica.number, request)

    # Messages from an engine.

    def _read_greetings(self) -> None:
        for name, greeting in self._end.read_greetings():
            match greeting:
                case Hello():
                    self._reachable(greeting)
                case Join():
                    self._welcome(name)

    def _welcome(self, name: bytes) -> None:
        layout = self._table.layout
        with suppress(Unreachable):  # the machine has gone again
            self._end.welcome(name, Welcome(PROTOCOL, self._servers, layout.size, layout.here))

    def _read_answers(self) -> None:
        for number, answer in self._end.read_answers():
            if isinstance(answer, Hello):
                self._connected(answer)
            elif (replica := self._table.replicas.get(number)) is not None:
                self._receive(replica, answer)

    def _read_monitor(self) -> None:
        self._read_answers()  # its last answers came before its end
        for number in self._end.disconnected():
            if not (self._watched and number in self._table.layout.local):
                self._lose_process(number)

    def _find(self, hello: Hello) -> Replica | None:
        """The replica that says hello, or None if it is of another version or has too high a number."""
        replica = self._table.find(hello.engine)
        if replica is not None and hello.protocol != PROTOCOL:
            self._lose(hello.engine, "the engine is of another version than this server: restart all of them")
            return None
        return replica

    def _reachable(self, hello: Hello) -> None:
        """Note that requests can be sent to an engine from now on."""
        replica = self._find(hello)
        if replica is not None:
            replica.reachable = True
            self._refresh()

    def _connected(self, hello: Hello) -> None:
        """Note that answers come from an engine: a new one, one in another's place, or the same one again."""
        replica = self._find(hello)
        if replica is None:
            return
        again = replica.connected
        replica.reset()
        replica.connected = True
        if again:
            self._refresh()
            self._dispatcher.reassign(replica)  # it aborted all its requests when its connection ended

    def _receive(self, replica: Replica, answer: Answer) -> None:
        match answer:
            case Outputs(outputs, stats):
                for output in outputs:
                    self._dispatcher.deliver(replica, output)
                replica.stats = stats or replica.stats
            case Stats():
                replica.stats = answer
            case Progress(folder=folder):
                replica.progress = answer
                if folder and replica.number in self._table.layout.local:
                    self.folder = folder
                    self.folder_known.set()
                if self._on_progress is not None:
                    self._on_progress(self.progress)
            case Ready():
                self._set_ready(replica, answer)
            case Leaving():
                replica.leaving = True
            case Dead(reason):
                self._lose(replica.number, reason, explained=replica.number in self._table.layout.local)
            case Hello():
                pass  # it is handled before

    def _set_ready(self, replica: Replica, ready: Ready) -> None:
        if refusal := self._table.set_ready(replica, ready):
            self._dispatcher.notify(replica.number, Drain(seconds=0))
            self._lose(replica.number, refusal)
            return
        self._refresh()
        if (size := self._table.layout.size) > 1:
            ready_ones = sum(one.ready is not None for one in self.replicas)
            _log.info("replica %d is ready: %d of %d", replica.number, ready_ones, size)

    def _refresh(self) -> None:
        changed = self._table.refresh()
        if self.ready is not None:
            self.ready_or_dead.set()
        if changed:
            self.on_change()
