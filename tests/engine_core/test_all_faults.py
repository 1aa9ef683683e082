"""Everything that can go wrong, at once: each request has one last answer, and it is the right one."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_worker import EOS, facts, reference, vectors_of
from faulty_executor import EngineKilled, FaultyExecutor, prompt_of
from scripted_speculator import ScriptedGuesser, use
from sizes import engine_config

from engine_core.client.dispatcher import Dispatcher
from engine_core.client.in_flight import InFlight, Stream, is_terminal
from engine_core.client.replica import Replica
from engine_core.client.replica_routing import ReplicaTable
from engine_core.config import Replicas
from engine_core.engine import Engine
from engine_core.protocol import (
    Abort,
    AddRequest,
    AddRequests,
    Failed,
    Output,
    Pause,
    Pooled,
    Request,
    Resume,
    Tokens,
)
from engine_core.reason_codes import DEADLINE, QUARANTINED
from engine_core.wire.transport import Unreachable
from worker.config import WorkerConfig
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep
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

    def submit(self, add: AddRequest, *, pools: bool = False) -> None:
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
            case AddRequest() as add:
                process.engine.add(0, add)
            case AddRequests(adds):
                for add in adds:
                    process.engine.add(0, add)
            case Abort(ids):
                process.engine.abort(0, ids)
            case Pause(ids):
                process.engine.pause(0, ids)
            case Resume(ids):
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


REQUESTS = 24


def random_world(model: Path, rnd: random.Random, *, guesses: bool) -> World:
    limits = facts(
        num_blocks=rnd.choice([12, 16, 64]),
        max_num_seqs=rnd.choice([2, 4, 8]),
        max_model_len=40,
        most_rows=64 * guesses,
    )
    return World(
        model,
        rnd,
        limits,
        replicas=rnd.choice([1, 1, 2, 3]),
        steps_ahead=rnd.choice([0, 1, 2]),
        enable_prefix_caching=rnd.random() < 0.7,
        scheduling_policy=rnd.choice(["fcfs", "priority"]),
        max_token_gap_ms=rnd.choice([0.0, 1.0]),
    )


def random_request(rnd: random.Random, id: int) -> AddRequest:
    first = FAILS if (bad := rnd.random()) < 0.06 else KILLS if bad < 0.09 else rnd.randint(1, 3)
    # A convicted prompt is refused from then on, so no two of them are equal.
    prompt = [first, id + 1, *(rnd.randint(1, 3) for _ in range(rnd.randint(0, 14)))]
    params = (
        Pooling(task=rnd.choice(["embed", "token_embed"]))
        if rnd.random() < 0.2
        else Sampling(max_tokens=rnd.randint(1, 20), stop_token_ids=rnd.choice([(), (EOS, 7)]))
    )
    return AddRequest(
        id,
        prompt,
        params,
        rnd.randint(0, 2),
        owner=rnd.choice("abc"),
        weight=rnd.choice([1.0, 3.0]),
        max_running=rnd.choice([0, 0, 1, 3]),
        wait=rnd.choice([0.0] * 6 + [0.05, 0.3]),
        budget=rnd.choice([0.0] * 6 + [0.1, 0.5]),
        streams=rnd.random() < 0.7,
    )


def misfortune(world: World, rnd: random.Random, aborted: set[int]) -> None:
    """Let something happen that nobody wants."""
    kind = rnd.choice(["kill", "leave", "start", "abort", "pause", "go"])
    numbers = list(world.processes)
    ids = world.open_ids()
    if kind == "kill" and numbers and not world.runs_alone(number := rnd.choice(numbers)):
        world.kill(number)
    elif kind == "leave" and numbers and world.others_stay(number := rnd.choice(numbers)):
        world.leave(number)
    elif kind == "start" and (gone := set(range(world.table.layout.size)) - set(numbers)):
        world.start(min(gone))
    elif kind == "abort" and ids:
        aborted.add(rnd.choice(ids))
        world.dispatcher.abort(aborted)
    elif kind in ("pause", "go") and ids:
        world.dispatcher.pause(rnd.sample(ids, min(3, len(ids))), paused=kind == "pause")
    else:
        return
    world.seen[kind] += 1


@pytest.mark.parametrize("part", range(4))
async def test_whatever_happens_every_answer_is_right(
    model: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Counter[str]()
    for seed in range(part * 25, (part + 1) * 25):
        rnd = random.Random(seed)
        use(monkeypatch, guesser := ScriptedGuesser(random.Random(seed)))
        world = random_world(model, rnd, guesses=seed % 2 > 0)
        monkeypatch.setattr("engine_core.engine.time", world)
        adds = [random_request(rnd, id) for id in range(REQUESTS)]
        aborted: set[int] = set()
        for add in adds:
            world.submit(add, pools=isinstance(add.params, Pooling))
            for _ in range(rnd.randint(1, 12)):
                if rnd.random() < 0.1:
                    misfortune(world, rnd, aborted)
                elif world.processes:
                    act = rnd.choice([world.read, world.step, world.step, world.hear])
                    act(rnd.choice(list(world.processes)))
        world.dispatcher.pause(world.open_ids(), paused=False)
        world.finish()
        seen["late"] += sum(is_late(stream.outputs[-1]) for stream in world.streams.values())
        for add in adds:
            check(add, world.streams[add.id].outputs, add.id in aborted, f"seed {seed}, request {add.id}")
        for process in world.processes.values():
            stats = process.engine.stats()
            assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
            seen["preemptions"] += stats.preemptions
        assert not len(world.dispatcher)
        seen += world.seen
        seen["held guesses"] += sum(guesser.held)
    kinds = ("kill", "killed itself", "leave", "start", "abort", "pause", "go", "preemptions", "late")
    kinds += ("held guesses",)
    assert all(seen[kind] > 5 for kind in kinds), f"too little happened: {seen}"


def is_late(output: Tokens | Pooled | Failed) -> bool:
    return isinstance(output, Failed) and output.error == DEADLINE


def check(add: AddRequest, outputs: list[Tokens | Pooled | Failed], aborted: bool, name: str) -> None:
    assert sum(map(is_terminal, outputs)) == 1 and is_terminal(outputs[-1]), name
    last = outputs[-1]
    text = [token for output in outputs if isinstance(output, Tokens) for token in output.tokens]
    guilty = add.tokens[0] in (FAILS, KILLS)
    late = is_late(last)
    assert not late or add.wait or add.budget, name
    if isinstance(last, Failed) and not late:
        convicted = (last.code, last.error) == (500, QUARANTINED)
        assert convicted == guilty or (aborted and isinstance(add.params, Pooling)), f"{name}: {last}"
    if isinstance(last, Pooled):
        assert isinstance(add.params, Pooling) and last.vectors == vectors_of(add.tokens, add.params), name
    elif isinstance(add.params, Sampling):
        whole = reference(add.tokens, add.params.max_tokens, add.params.stop_token_ids)
        ended_whole = isinstance(last, Tokens) and last.finish in ("stop", "length")
        assert text == (whole if ended_whole else whole[: len(text)]), name
        assert ended_whole or aborted or guilty or late, f"{name}: {last}"
    assert not guilty or aborted or isinstance(last, Failed), f"{name}: it was not found out"
