"""An API server's view of its engines: submit a request, read its stream, know which of them live.

Runs in one event loop and reads the sockets from that loop's own poll: no task, lock or queue per token.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress

from engine_core.client.dispatcher import Dispatch
from engine_core.client.in_flight import Order
from engine_core.client.replica import Replica
from engine_core.client.replica_table import Roster
from engine_core.client.streams import Stream
from engine_core.config import Address, Replicas
from engine_core.protocol import (
    PROTOCOL,
    STAGES,
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


class EngineClient:
    """Create it in the event loop that will use it.

    `located` is set once `folder` is known, `settled` once an engine is ready or all are dead,
    `died` once all are dead. That sets all three. An engine that dies while others live takes nothing with
    it but what it had begun.
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

        `watched`: the engines of this machine are children of this process, which calls `lose` with the exit
        code of each that ends. Without that, an engine has ended when its connection has.
        """
        self.dead: str | None = None
        """The reason why no replica is left, if none is."""
        self.explained = False
        """Whether the engine whose end is `dead` has printed the reason itself."""
        self.folder = ""
        """Of the checkpoint on this machine, once it is known."""
        self.located = asyncio.Event()
        self.settled = asyncio.Event()
        self.died = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        """Called when `ready` has changed."""
        self._servers = servers
        self._watched = watched
        self._on_progress = on_progress
        self._roster = Roster(replicas, servers)
        self._dispatch = Dispatch(self._roster, self._send)
        # Not from 0: answers meant for a server that crashed must not fit requests of the one in its place.
        self._last_id = secrets.randbits(48)
        self._loop = asyncio.get_running_loop()
        self._end = ServerEnd(address, replicas.door(server) if replicas.elsewhere else None)
        self._readers = {
            self._end.greetings.sock.FD: self._read_greetings,
            self._end.answers.sock.FD: self._read_answers,
            self._end.monitor.FD: self._read_monitor,
        }
        for descriptor, read in self._readers.items():
            self._loop.add_reader(descriptor, read)
            read()  # a descriptor of ZMQ tells of what comes after the socket was found empty

    @property
    def ready(self) -> Ready | None:
        """Of all replicas that work, as one."""
        return self._roster.ready

    @property
    def progress(self) -> Progress:
        return self._roster.progress

    @property
    def stats(self) -> Stats | None:
        """Of all replicas together."""
        return self._roster.stats

    @property
    def replicas(self) -> list[Replica]:
        """Those that are known: the ones on this machine, and what has called from others."""
        return list(self._roster.replicas.values())

    @property
    def open_streams(self) -> int:
        return len(self._dispatch)

    # Requests.

    def submit(
        self,
        tokens: list[int],
        params: Sampling,
        *,
        priority: int = 0,
        salt: str = "",
        replica: int | None = None,
    ) -> Stream[Tokens]:
        """Send a request, to one replica if it is named. The stream ends with exactly one terminal answer."""
        add = self._add(tokens, params, priority, salt)
        stream: Stream[Tokens] = Stream(add.id, self._loop)
        self._dispatch.place([Order(add, stream, replica)])
        return stream

    def submit_many(
        self,
        requests: Iterable[tuple[list[int], Pooling]],
        *,
        priority: int = 0,
        salt: str = "",
        replica: int | None = None,
    ) -> list[Stream[Pooled]]:
        """Send many requests for vectors, in few frames. Each stream has one answer."""
        adds = [self._add(tokens, params, priority, salt) for tokens, params in requests]
        streams = [Stream[Pooled](add.id, self._loop, pools=True) for add in adds]
        self._dispatch.place([Order(add, stream, replica) for add, stream in zip(adds, streams, strict=True)])
        return streams

    def abort(self, ids: Iterable[int]) -> None:
        """End these requests: with finish "abort", or Failed. Those that have ended are passed over."""
        self._dispatch.abort(ids)

    def drain(self, seconds: float) -> None:
        """Let the engines finish what they have, within that time, and end."""
        self._tell_all(Drain(seconds=seconds))

    def reset_prefix_cache(self) -> None:
        self._roster.forget_prefixes()
        self._tell_all(ResetPrefixCache())

    # Ends.

    def lose(self, number: int, code: int) -> None:
        """The process of an engine on this machine has exited. A reason that it gave itself comes first."""
        if self.dead is None:
            self._read_answers()
            self._lose_process(number, f": {describe_exit(code)}", explained=code in (BROKE, CANNOT_START))

    def lose_all(self) -> None:
        """The processes of all engines on this machine have exited."""
        self._read_monitor()
        for number in self._roster.layout.local:
            self._lose_process(number)

    def _lose_process(self, number: int, how: str = "", *, explained: bool = False) -> None:
        if (replica := self._roster.replicas.get(number)) is not None:
            doing = STAGES[replica.progress.stage]
            self._lose(number, f"the engine process ended while {doing}{how}", explained=explained)

    def _lose(self, number: int, reason: str, *, explained: bool = False) -> None:
        replica = self._roster.replicas.get(number)
        if replica is None or replica.lost is not None or self.dead is not None:
            return
        self._roster.lose(replica, reason)
        if self._roster.hopeless:
            self.explained = explained
            self.fail(reason)
            return
        _log.error("replica %d has ended: %s", number, reason)
        self._update()
        self._dispatch.vacate(replica)

    def fail(self, reason: str) -> None:
        """No engine is left: every open stream ends. The first reason counts."""
        if self.dead is not None:
            return
        self.dead = reason
        self._dispatch.close(reason)
        for event in (self.located, self.settled, self.died):
            event.set()

    def close(self) -> None:
        self.fail("the server has stopped")
        for descriptor in self._readers:
            self._loop.remove_reader(descriptor)
        self._readers.clear()
        self._end.close()

    # On the way to an engine.

    def _add(self, tokens: list[int], params: Sampling | Pooling, priority: int, salt: str) -> Add:
        self._last_id += 1
        return Add(id=self._last_id, tokens=tokens, params=params, priority=priority, salt=salt)

    def _send(self, number: int, request: Request) -> None:
        self._end.send(number, request)
        self._read_greetings()  # sending may swallow the socket's one notice that something can be read

    def _tell_all(self, request: Request) -> None:
        for replica in self.replicas:
            self._dispatch.tell(replica.number, request)

    # On the way from an engine.

    def _read_greetings(self) -> None:
        for peer, greeting in self._end.read_greetings():
            match greeting:
                case Hello():
                    self._greet(greeting)
                case Join():
                    self._welcome(peer)

    def _welcome(self, peer: bytes) -> None:
        layout = self._roster.layout
        with suppress(Unreachable):  # it has left again
            self._end.welcome(peer, Welcome(PROTOCOL, self._servers, layout.size, layout.here))

    def _read_answers(self) -> None:
        for number, answer in self._end.read_answers():
            if isinstance(answer, Hello):
                self._begin(answer)
            elif (replica := self._roster.replicas.get(number)) is not None:
                self._receive(replica, answer)

    def _read_monitor(self) -> None:
        self._read_answers()  # its last words came before its end
        for number in self._end.left():
            if not (self._watched and number in self._roster.layout.local):
                self._lose_process(number)

    def _meet(self, hello: Hello) -> Replica | None:
        """The replica of that name, if it may be one."""
        replica = self._roster.meet(hello.engine)
        if replica is not None and hello.protocol != PROTOCOL:
            self._lose(hello.engine, "the engine is of another version than this server: restart all of them")
            return None
        return replica

    def _greet(self, hello: Hello) -> None:
        """The way to an engine is open."""
        replica = self._meet(hello)
        if replica is not None:
            replica.reachable = True
            self._update()

    def _begin(self, hello: Hello) -> None:
        """An engine has connected: the first of that number, or one in its place, or itself once more."""
        replica = self._meet(hello)
        if replica is None:
            return
        again = replica.heard
        replica.begin()
        replica.heard = True
        if again:
            self._update()
            self._dispatch.vacate(replica)  # when its line was cut it gave up all that came through it

    def _receive(self, replica: Replica, answer: Answer) -> None:
        match answer:
            case Outputs(outputs, stats):
                for output in outputs:
                    self._dispatch.deliver(replica, output)
                replica.stats = stats or replica.stats
            case Stats():
                replica.stats = answer
            case Progress(folder=folder):
                replica.progress = answer
                if folder and replica.number in self._roster.layout.local:
                    self.folder = folder
                    self.located.set()
                if self._on_progress is not None:
                    self._on_progress(self.progress)
            case Ready():
                self._enlist(replica, answer)
            case Leaving():
                replica.leaving = True
            case Dead(reason):
                self._lose(replica.number, reason, explained=replica.number in self._roster.layout.local)
            case Hello():
                pass  # is told apart before

    def _enlist(self, replica: Replica, ready: Ready) -> None:
        if refusal := self._roster.enlist(replica, ready):
            self._dispatch.tell(replica.number, Drain(seconds=0))
            self._lose(replica.number, refusal)
            return
        self._update()
        if (size := self._roster.layout.size) > 1:
            ready_ones = sum(one.ready is not None for one in self.replicas)
            _log.info("replica %d is ready: %d of %d", replica.number, ready_ones, size)

    def _update(self) -> None:
        changed = self._roster.update()
        if self.ready is not None:
            self.settled.set()
        if changed:
            self.on_change()
