"""The API server's side of its engines: submit a request, read its stream, know which engines live.

It runs in one event loop. What its engines say comes by a `Link`: sockets, or an engine in this process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Unpack

from msgspec.structs import replace

from engine_core import protocol
from engine_core.adapters.messages import AdapterState
from engine_core.client.dispatcher import Dispatcher
from engine_core.client.engine_adapters import EngineAdapters
from engine_core.client.in_flight import AddOptions, InFlight, Stream
from engine_core.client.operator_commands import OperatorCommands
from engine_core.client.replica import EndCode, Replica, Stalled
from engine_core.client.replica_routing import ReplicaTable
from engine_core.config import Address, Replicas
from engine_core.engine_stats import Stats
from engine_core.prompt_media import Media
from engine_core.reason_codes import Reason
from engine_core.wire.transport import Link, SocketLink
from worker.child import BROKE, CANNOT_START, describe_exit
from worker.protocol import Pooling, Sampling

_log = logging.getLogger(__name__)


class EngineClient:
    """The engines of one model, as one. Requests outlive engines.

    The event `folder_known` is set once `folder` is known, `ready_or_dead` once an engine is ready, and
    `died` once all engines are given up, which sets all three.
    """

    def __init__(
        self,
        where: Address | Link,
        replicas: Replicas = Replicas(),
        *,
        server: int = 0,
        servers: int = 1,
        restarts: bool = False,
        restart_wait: float | None = None,
        on_progress: Callable[[protocol.Progress], None] | None = None,
    ) -> None:
        """Call this in the event loop that is used. This is number `server` of so many `servers`.

        `where`: where engines find it, or what else carries its messages.
        `restarts`: engines are started again, and requests wait for them for `restart_wait` seconds while
        none works, by default as long as starts take. Without either one that has ended is given up at once.
        """
        self.dead: str | None = None
        """The reason why no replica is left, if all are given up."""
        self.broke = False
        """Whether the reason is an error in this client, which another one in its place may not meet."""
        self.gathers = False
        """Whether answers that nobody reads as they come are read at their first token and at their end."""
        self.explained = False
        """Whether the engine whose end is `dead` has printed the reason itself."""
        self.folder = ""
        """The checkpoint's folder on this machine, once it is known."""
        self.folder_known, self.ready_or_dead, self.died = (asyncio.Event() for _ in range(3))
        self.on_change: Callable[[], None] = lambda: None
        """Called when `ready` has changed."""
        self._servers, self._on_progress = servers, on_progress
        self._restarts = restarts or restart_wait is not None
        self._shares_clock = not replicas.elsewhere
        self._table, wait = ReplicaTable(replicas, servers), restart_wait if self._restarts else 0.0
        self._dispatcher = sender = Dispatcher(self._table, self._send, wait)
        self.standing, self.abort, self.call_workers = sender.standing, sender.abort, sender.call_workers
        self.orders = OperatorCommands(self._table, self._dispatcher.notify)
        self.adapters = EngineAdapters(sender.notify, self.orders.until, self.orders.tell)
        # Not from 0: answers meant for a server that crashed must not fit requests of the one in its place.
        self._last_id = secrets.randbits(48)
        self._loop = asyncio.get_running_loop()
        tcp_address = replicas.tcp_address(server) if replicas.elsewhere else None
        self._link = SocketLink(where, tcp_address) if isinstance(where, Address) else where
        self._link.open(self)

    @property
    def ready(self) -> protocol.Ready | None:
        return self._table.ready

    @property
    def progress(self) -> protocol.Progress:
        return self._table.progress

    @property
    def restarting(self) -> EndCode | Stalled | None:
        return self._table.restarting

    @property
    def stats(self) -> Stats | None:
        return self._table.stats

    @property
    def replicas(self) -> list[Replica]:
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
    ) -> Stream[protocol.Tokens]:
        """Send a request, to one replica if it is named. The stream ends with exactly one terminal answer."""
        [stream] = self.submit_all([(tokens, params)], replica=replica, **options)
        return stream

    def submit_all(
        self,
        prompts: Iterable[tuple[list[int], Sampling, *tuple[int, ...]]],
        *,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> list[Stream[protocol.Tokens]]:
        """Send a request for each prompt with its parameters, in few messages: media are sent once.

        Behind these are the lengths of its beginnings that later prompts have, too (`AddRequest.shared`).
        """
        sent, requests = self._now(), list[InFlight]()
        for tokens, params, *shared in prompts:
            options["shared"] = tuple(shared)
            add = protocol.AddRequest(self.new_number(), tokens, params, sent=sent, **options)
            gathers = self.gathers and not add.streams and not add.times_each
            requests.append(InFlight(add, Stream(add.id, self._loop, gathers=gathers), replica))
        self._dispatcher.dispatch(requests)
        return [one.stream for one in requests]

    def submit_many(
        self,
        requests: Iterable[tuple[list[int], Pooling, *tuple[Media, ...]]],
        *,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> list[Stream[protocol.Pooled]]:
        """Send many requests for vectors, in few messages: tokens, parameters, and the media of each.

        Each stream has one answer.
        The option `wait` is for the first: others wait for it, too, and not for other clients alone.
        """
        sent, wait = self._now(), options.pop("wait", 0.0)
        adds: list[protocol.AddRequest] = []
        for tokens, params, *media in requests:
            options["media"] = tuple(media)
            adds.append(
                protocol.AddRequest(id=self.new_number(), tokens=tokens, params=params, sent=sent, **options)
            )
        if wait:
            adds[0] = replace(adds[0], wait=wait)
        streams = [Stream[protocol.Pooled](add.id, self._loop, pools=True) for add in adds]
        pairs = zip(adds, streams, strict=True)
        self._dispatcher.dispatch([InFlight(add, stream, replica) for add, stream in pairs])
        return streams

    def spell(self, spelling: protocol.Spelling) -> None:
        """Say how tokens are spelled, which engines are told before their first request with a grammar."""
        self._dispatcher.spelling = spelling

    def new_number(self) -> int:
        """A number that no request and no group of this server has had."""
        self._last_id += 1
        return self._last_id

    def _now(self) -> float:
        """The time on the clock that all engines share, or 0 if some run on other machines."""
        return time.monotonic() if self._shares_clock else 0.0

    def pause(self, ids: Iterable[int]) -> None:
        """Have nothing more computed for these requests until `resume`: their answers are not read."""
        self._dispatcher.pause(ids, paused=True)

    def resume(self, ids: Iterable[int]) -> None:
        self._dispatcher.pause(ids, paused=False)

    def drain(self, seconds: float) -> None:
        """Let the engines finish what they have, within that time, and end."""
        self.orders.tell(protocol.Drain(seconds=seconds))

    # Engines end.

    def engine_exited(self, number: int, code: int, at: float = math.inf) -> None:
        """Note that the process of an engine on this machine has exited. A reason it gave itself counts.

        `at` is when it did, on the monotonic clock. A process that has connected since then is another one.
        """
        replica = self._after_its_answers(number)
        if replica is None or (replica.connected and replica.connected_at > at):
            return
        if replica.lost is None:
            explained = code in (BROKE, CANNOT_START)
            self._lose(number, replica.how_it_ended(f": {describe_exit(code)}"), explained=explained)
        replica.explain_loss(code)

    def engine_given_up(self, number: int, reason: str, *, explained: bool) -> None:
        """Note that an engine of this machine has ended and is not started again, for `reason` if any.

        `explained`: the engine has said the reason itself, in words that count more than `reason`.
        """
        replica = self._after_its_answers(number)
        if replica is None:
            return
        self._lose(number, reason or replica.how_it_ended(), explained=explained)
        known = replica.lost if explained or not reason else None
        self._give_up(replica, known or reason, explained=explained)

    def engine_stalled(self, number: int, stalled: bool) -> None:
        """Note that an engine of this machine has work and makes no progress, or that it goes on."""
        if (replica := self._table.replicas.get(number)) is not None:
            replica.stalled = stalled
        self._dispatcher.dispatch_held()

    def _after_its_answers(self, number: int) -> Replica | None:
        """The replica of that number, if it matters, once all that it has sent is read."""
        replica = self._table.replicas.get(number) if self.dead is None else None
        if replica is not None:
            self._link.read()
        return replica

    def _lose(self, number: int, reason: str, *, explained: bool = False, for_good: bool = False) -> None:
        """Note that an engine has ended. `for_good`: no other one will take its place."""
        replica = self._table.replicas.get(number)
        if replica is None or replica.lost is not None or self.dead is not None:
            return
        blamed = None if replica.leaving else replica.ready
        ended = self._table.lose(replica, reason)
        if for_good or (not self._restarts and number in self._table.layout.local):
            for one in reversed(ended):
                self._give_up(one, reason, explained=explained)
        if self.dead is not None:
            return
        if 1 < len(self._table.layout.numbers) > number:  # of an only one, whoever starts it again says so
            _log.error("replica %d has ended: %s", number, reason)
        self._refresh()
        for one in ended:  # no request of those that end with it is to blame
            self._dispatcher.hand_over(one, blamed if one is replica else None)

    def _give_up(self, replica: Replica, reason: str, *, explained: bool) -> None:
        replica.given_up = True
        if self._table.hopeless and self.dead is None:
            self.explained = explained
            self.fail(reason)
        self._refresh()  # what waits for this replica alone waits no more

    def fail(self, reason: str, code: Reason = "engine_given_up") -> None:
        """End every open stream, as no engine is left; clients are told the code. The first call counts."""
        if self.dead is not None:
            return
        self.dead = reason
        self._dispatcher.close(reason, code)
        for event in (self.folder_known, self.ready_or_dead, self.died):
            event.set()
        self.orders.notice()

    def close(self) -> None:
        self.fail("the server has stopped", "draining")
        self._link.close()

    # Messages to an engine.

    def _send(self, number: int, request: protocol.Request) -> None:
        self._link.send(number, request)

    # What a link tells.

    def misheard(self) -> None:
        self.broke = True
        self.fail("the server could not handle an answer of an engine")

    def welcome(self) -> protocol.Welcome:
        layout = self._table.layout
        return protocol.Welcome(protocol.PROTOCOL, self._servers, layout.size, layout.here)

    def heard(self, number: int, answer: protocol.Answer) -> None:
        replica = self._table.replicas.get(number)
        if replica is None:
            return
        match answer:
            case protocol.Outputs(outputs, stats):
                for output in outputs:
                    self._dispatcher.deliver(replica, output)
                replica.stats = stats or replica.stats
            case Stats():
                replica.stats = answer
            case protocol.Progress(folder=folder):
                replica.note_progress(answer)
                if answer.phase == "asleep":
                    self.orders.note_asleep(number)
                self.orders.notice()
                if folder and replica.number in self._table.layout.local:
                    self.folder = folder
                    self.folder_known.set()
                if self._on_progress is not None:
                    self._on_progress(self.progress)
            case protocol.Ready():
                self._set_ready(replica, answer)
            case AdapterState():
                self.adapters.receive(replica, answer)
                self.orders.notice()
            case protocol.Returned():
                self._dispatcher.deliver_returned(answer)
            case protocol.AllPaused(paused):
                self.orders.note_paused(number, paused=paused)
            case protocol.WeightsUpdated():
                self.orders.note_updated(number, answer)
            case protocol.Leaving():
                replica.leaving = True
            case protocol.Dead(reason, with_another):
                replica.leaving |= with_another
                self._lose(replica.number, reason, explained=replica.number in self._table.layout.local)
            case protocol.Hello():
                pass  # it is handled before

    def disconnected(self, number: int) -> None:
        if (replica := self._table.replicas.get(number)) is not None:
            self._lose(number, replica.how_it_ended())

    def _find(self, hello: protocol.Hello) -> Replica | None:
        """The replica that says hello, or None if it is of another version or has too high a number."""
        replica = self._table.find(hello.engine)
        if replica is not None and hello.protocol != protocol.PROTOCOL:
            reason = "the engine is of another version than this server: restart all of them"
            self._lose(hello.engine, reason, for_good=True)
            return None
        return replica

    def reachable(self, hello: protocol.Hello) -> None:
        if (replica := self._find(hello)) is not None:
            replica.reachable = True
            self._refresh()

    def connected(self, hello: protocol.Hello) -> None:
        replica = self._find(hello)
        if replica is None:
            return
        again, ready = replica.connected, None if replica.leaving else replica.ready
        replica.reset()
        replica.connected, replica.connected_at = True, time.monotonic()
        if again:
            self._refresh()
            # It aborted all its requests when its connection ended.
            self._dispatcher.hand_over(replica, ready)

    def _set_ready(self, replica: Replica, ready: protocol.Ready) -> None:
        if refusal := self._table.set_ready(replica, ready):
            self._dispatcher.notify(replica.number, protocol.Drain(seconds=0))
            self._lose(replica.number, refusal, for_good=True)
            return
        self.orders.welcome(replica.number, ready.weights)
        self.adapters.welcome(replica)
        self._refresh()
        if (size := len(self._table.layout.numbers)) > 1:
            ready_ones = sum(one.ready is not None for one in self.replicas)
            _log.info("replica %d is ready: %d of %d", replica.number, ready_ones, size)

    def _refresh(self) -> None:
        changed = self._table.refresh()
        self.orders.notice()
        if self.ready is not None:
            self.ready_or_dead.set()
        if changed:
            self.on_change()
        self._dispatcher.dispatch_held()
