"""A server's dispatcher and its engines in one thread, in which a test decides what happens next.

Messages travel when the test says so. Engines are killed, leave and are started again; their steps fail;
requests are aborted and paused. The workers are fake ones, so that each answer is known before.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from faulty_executor import EngineKilled, FaultyExecutor, prompt_of
from sizes import engine_config

from engine_core.client.dispatcher import Dispatcher
from engine_core.client.in_flight import InFlight, Stream, is_terminal
from engine_core.client.replica import Replica
from engine_core.client.replica_table import ReplicaTable
from engine_core.config import Replicas
from engine_core.engine import Engine
from engine_core.protocol import (
    Abort,
    Add,
    AddMany,
    Failed,
    Go,
    Output,
    Pause,
    Pooled,
    Request,
    Tokens,
)
from engine_core.wire.transport import Unreachable
from worker.config import WorkerConfig
from worker.protocol import NewSeq, SeqStep
from worker.worker_facts import WorkerFacts

FAILS = 40
"""The first token of prompts that make steps fail."""
KILLS = 41
"""The first token of prompts that end their engine."""
STEP_SECONDS = 0.005
ARRIVES_IN = 0.02
"""The seconds after which an answer arrives even if its engine is killed."""


class Answers(Stream[Tokens | Pooled]):  # pyright: ignore[reportInvalidTypeArguments]
    """A stream of which every output is kept."""

    __slots__ = ("outputs",)

    def __init__(self, id: int, *, pools: bool) -> None:
        super().__init__(id, asyncio.get_running_loop(), pools=pools)
        self.outputs: list[Tokens | Pooled | Failed] = []

    def put(self, output: Tokens | Pooled | Failed) -> None:
        self.outputs.append(output)

    @property
    def ended(self) -> bool:
        return any(map(is_terminal, self.outputs))


@dataclass
class Process:
    """An engine with the messages that are on their way to it and from it."""

    engine: Engine
    inbox: deque[Request] = field(default_factory=deque)
    outbox: deque[tuple[float, list[Output]]] = field(default_factory=deque)
    """Answers, each with the time at which it was sent."""


def _starts_with(token: int) -> Callable[[NewSeq, SeqStep], bool]:
    return lambda entered, row: prompt_of(entered)[0] == token


class World:
    """Its clock, `monotonic`, takes the place of the module `time` in `engine_core.engine`."""

    def __init__(
        self, model: Path, rnd: random.Random, limits: WorkerFacts, *, replicas: int, **options: object
    ) -> None:
        """Call this in an event loop. `limits` are those of each worker, and `options` those of engines."""
        self.random = rnd
        self.limits = limits
        self.config = engine_config(model, **options)
        self.table = ReplicaTable(Replicas(size=replicas, here=replicas), servers=1)
        self.dispatcher = Dispatcher(self.table, self._send, restart_wait=10_000.0)
        self.processes: dict[int, Process] = {}
        self.now = 0.0
        """The time on the clock of all engines, of which each step takes a while."""
        self.requests: dict[int, InFlight] = {}
        self.streams: dict[int, Answers] = {}
        self.seen = Counter[str]()
        for number in range(replicas):
            self.start(number)

    def monotonic(self) -> float:
        return self.now

    # Requests.

    def submit(self, add: Add, *, pools: bool = False) -> None:
        self.streams[add.id] = Answers(add.id, pools=pools)
        self.requests[add.id] = InFlight(add, self.streams[add.id])
        self.dispatcher.dispatch([self.requests[add.id]])

    def open_ids(self) -> list[int]:
        return [id for id, stream in self.streams.items() if not stream.ended]

    # Engines.

    def start(self, number: int) -> None:
        """Start an engine in the place of one that has ended."""
        engine = Engine.start(self.config, lambda _: None, self._make_executor)
        self.processes[number] = Process(engine)
        replica = self._replica(number)
        replica.reset()
        replica.connected = replica.reachable = True
        assert self.table.set_ready(replica, engine.ready) is None
        self.table.refresh()
        self.dispatcher.dispatch_held()

    def kill(self, number: int) -> None:
        """End an engine at once. The last of what it has said may not have arrived."""
        process = self.processes.pop(number)
        surely = sum(sent + ARRIVES_IN <= self.now for sent, _ in process.outbox)
        for _ in range(self.random.randint(surely, len(process.outbox))):
            self._deliver(number, process.outbox.popleft()[1])
        replica = self._replica(number)
        ready, leaving = replica.ready, replica.leaving
        self.table.lose(replica, "killed")
        self.table.refresh()
        self.dispatcher.hand_over(replica, None if leaving else ready)

    def leave(self, number: int) -> None:
        """Let an engine finish what it has and take nothing new, as one that is told to end does."""
        self.processes[number].engine.drain()
        self._replica(number).leaving = True

    def others_stay(self, number: int) -> bool:
        """Whether an engine would be left if this one left too."""
        others = set(self.processes) - {number}
        return any(not self.is_leaving(other) for other in others)

    def runs_alone(self, number: int) -> bool:
        """Whether the end of this engine would be held against a request that runs alone."""
        replica = self._replica(number)
        return any(one.add.alone for one in self.requests.values() if one.replica is replica)

    def is_leaving(self, number: int) -> bool:
        return self._replica(number).leaving

    # What happens next.

    def read(self, number: int) -> None:
        """Let an engine read a message."""
        process = self.processes[number]
        if not process.inbox:
            return
        match process.inbox.popleft():
            case Add() as add:
                process.engine.add(0, add)
            case AddMany(adds):
                for add in adds:
                    process.engine.add(0, add)
            case Abort(ids):
                process.engine.abort(0, ids)
            case Pause(ids):
                process.engine.pause(0, ids)
            case Go(ids):
                process.engine.pause(0, ids, paused=False)
            case other:
                raise AssertionError(other)

    def step(self, number: int) -> None:
        """Let an engine run a step, which may be its last."""
        process = self.processes[number]
        if not process.engine.busy:
            return
        self.now += STEP_SECONDS
        try:
            outputs = process.engine.step().get(0, [])
        except EngineKilled:
            self.seen["killed itself"] += 1
            self.kill(number)
            return
        if outputs:
            process.outbox.append((self.now, outputs))

    def hear(self, number: int) -> None:
        """Let answers of an engine arrive that it gave at one time."""
        process = self.processes[number]
        if process.outbox:
            self._deliver(number, process.outbox.popleft()[1])

    def finish(self) -> None:
        """Let everything come to its end, without further mishaps."""
        for _ in range(100_000):
            for number in range(self.table.layout.size):
                process = self.processes.get(number)
                if process is None:
                    self.start(number)
                elif self.is_leaving(number) and not (process.engine.busy or process.inbox or process.outbox):
                    self.kill(number)
                else:
                    for act in (self.read, self.step, self.hear):
                        if number in self.processes:
                            act(number)
            if not self.open_ids() and not any(each.outbox or each.inbox for each in self.processes.values()):
                return
        raise AssertionError(f"these requests never end: {self.open_ids()}")

    def _send(self, number: int, request: Request) -> None:
        if number not in self.processes:
            raise Unreachable
        self.processes[number].inbox.append(request)

    def _deliver(self, number: int, outputs: list[Output]) -> None:
        for output in outputs:
            self.dispatcher.deliver(self._replica(number), output)

    def _replica(self, number: int) -> Replica:
        return self.table.replicas[number]

    def _make_executor(self, config: WorkerConfig, report: Callable[[str, float], None]) -> FaultyExecutor:
        executor = FaultyExecutor(config, report, self.limits)
        executor.fault = _starts_with(FAILS)
        executor.kills = _starts_with(KILLS)
        executor.random = self.random
        return executor
