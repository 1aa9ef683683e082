"""Real ranks in processes of their own, under a real engine, for tests of layouts.

The processes stay; the ranks of each model that is opened have a rendezvous of their own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair

import msgspec
import rank_process
import zmq
from fake_adapters import CalledBefore

from engine_core.executor import ReportPhase
from models.parallel.experts import Placement, Transport
from worker.buffers import Encoder
from worker.calls.messages import WorkerCall, WorkerReturn
from worker.config import Place, WorkerConfig
from worker.protocol import StepInput, StepOutput
from worker.worker_facts import WorkerFacts

PATIENCE = 60
"""The seconds that a test waits for a rank, twice: a machine may stand still for longer."""


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    stages: int = 1
    experts: Placement | None = None
    """How whole experts are divided among tensor ranks; None: each has a piece of every expert."""
    transport: Transport = "allgather_reducescatter"
    replicas: int = 1
    """The number of replicas that share whole experts."""

    def __str__(self) -> str:
        shared = f"xDP{self.replicas} {self.transport}" if self.replicas > 1 else ""
        return f"TP{self.tensor}xPP{self.stages}{self.experts or ''}{shared}"

    @property
    def size(self) -> int:
        return self.tensor * self.stages

    def places(self, rendezvous: str) -> list[Place]:
        """The places of all ranks of the only replica."""
        return self.places_of(0, rendezvous, "")

    def places_of(self, replica: int, rendezvous: str, of_replicas: str) -> list[Place]:
        """The places of one replica's ranks. `of_replicas`: where those of all replicas meet."""
        return [
            Place(
                tensor_rank=rank % self.tensor,
                tensor_size=self.tensor,
                stage=rank // self.tensor,
                stages=self.stages,
                local_rank=replica * self.size + rank,
                local_ranks=self.size * self.replicas,
                rendezvous=rendezvous,
                replica=replica if self.replicas > 1 else None,
                expert_rank=replica * self.tensor + rank % self.tensor,
                expert_size=1 if self.experts is None else self.tensor * self.replicas,
                expert_placement=self.experts or "linear",
                expert_transport=self.transport,
                expert_replicas=self.replicas,
                expert_rendezvous=of_replicas,
            )
            for rank in range(self.size)
        ]


class RankError(Exception):
    """The message of a rank that failed."""


class Ranks:
    def __init__(self, count: int, folder: Path, *command: str) -> None:
        """`folder`: where the ranks of each model meet.

        `command`: the program that forks itself into ranks, and its arguments.
        """
        self._folder = folder
        self._models = 0
        ends = [socketpair() for _ in range(count)]
        theirs = [end.fileno() for _, end in ends]
        program = [sys.executable, *(command or [rank_process.__file__]), *map(str, theirs)]
        self._process = subprocess.Popen(program, pass_fds=theirs)
        self.pipes = [Connection(end.detach()) for end, _ in ends]
        for _, end in ends:
            end.close()

    def rendezvous(self) -> str:
        self._models += 1
        return f"file://{self._folder}/{self._models}"

    def open(self, configs: Sequence[WorkerConfig]) -> list[tuple[WorkerFacts, int]]:
        """Open one runner on each rank; -> facts, and bytes read."""
        for pipe, config in zip(self.pipes, configs, strict=False):
            pipe.send_bytes(b"o" + msgspec.msgpack.encode(config))
        frames = [self._frame(pipe) for pipe in self.pipes[: len(configs)]]
        for frame in frames:
            self._check(frame)
        return [msgspec.msgpack.decode(frame[1:], type=tuple[WorkerFacts, int]) for frame in frames]

    def hear(self, pipe: Connection) -> bytes:
        frame = self._frame(pipe)
        self._check(frame)
        return frame

    @staticmethod
    def _frame(pipe: Connection) -> bytes:
        if not (pipe.poll(PATIENCE) or pipe.poll(PATIENCE)):
            raise RankError("a rank says nothing")
        return pipe.recv_bytes()

    @staticmethod
    def _check(frame: bytes) -> None:
        if frame[:1] == b"e":
            raise RankError(frame[1:].decode())

    def close_model(self, count: int) -> None:
        """Close the runners, those of the last stage first: one of them may not have sent its tokens yet."""
        for pipe in reversed(self.pipes[:count]):
            pipe.send_bytes(b"c")
            self.hear(pipe)

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        if code := self._process.wait(timeout=PATIENCE):
            raise RankError(f"a rank ended with {code}")


class RanksOfTests:
    """An executor that sends each step to all ranks at once, and reads the answer later."""

    def __init__(self, ranks: Ranks, layout: Layout, config: WorkerConfig) -> None:
        self._ranks = ranks
        self._layout = layout
        self._configs = [
            msgspec.structs.replace(config, place=place) for place in layout.places(ranks.rendezvous())
        ]
        self._pipes = ranks.pipes[: layout.size]
        self._asked = 0
        self.most_in_flight = 0
        self.facts: list[tuple[WorkerFacts, int]] = []

    def start(self) -> WorkerFacts:
        self.facts = self._ranks.open(self._configs)
        return self.facts[self._answering][0]

    def submit(self, step: StepInput) -> _Step:
        head, *frames = Encoder().encode(step)
        for pipe in self._pipes:
            for frame in (b"s" + head, *frames):
                pipe.send_bytes(frame)
        self._asked += 1
        self.most_in_flight = max(self.most_in_flight, self._asked)
        return _Step(self)

    def call(self, call: WorkerCall) -> CalledBefore:
        """Run a method on all ranks. No step may be under way."""
        assert not self._asked
        for pipe in self._pipes:
            pipe.send_bytes(b"m" + msgspec.msgpack.encode(call))
        frames = [self._ranks.hear(pipe) for pipe in self._pipes]
        return CalledBefore([msgspec.msgpack.decode(frame[1:], type=WorkerReturn) for frame in frames])

    def register(self, poller: zmq.Poller) -> None:
        """Does nothing: these steps are always waited for."""

    def check(self) -> None:
        """Does nothing: an error is raised when a step is awaited."""

    def idle(self, *, wait: bool = False) -> bool:
        """Let all ranks prepare something; returns whether one had something to prepare."""
        for pipe in self._pipes:
            pipe.send_bytes(b"p")
        left = {self._ranks.hear(pipe) for pipe in self._pipes}
        if len(left) > 1:
            raise RankError("the ranks do not prepare the same")
        return left == {b"p\1"}

    def stop(self) -> None:
        if self.facts:
            self._ranks.close_model(self._layout.size)
            self.facts = []

    @property
    def _answering(self) -> int:
        return next(rank for rank, config in enumerate(self._configs) if config.place.returns_outputs)

    def next_output(self) -> StepOutput:
        """The output of the oldest step. All ranks are read, or one that failed would go unnoticed."""
        ready = wait(self._pipes, timeout=PATIENCE) or wait(self._pipes, timeout=PATIENCE)
        if not ready:
            raise RankError("no rank says anything")
        frames = [self._ranks.hear(pipe) for pipe in self._pipes if pipe in ready]
        self._asked -= 1
        return msgspec.msgpack.decode(frames[0][1:], type=StepOutput)


@dataclass(frozen=True)
class _Step:
    executor: RanksOfTests

    def done(self) -> bool:
        return False

    def result(self) -> StepOutput:
        return self.executor.next_output()


def make(ranks: Ranks, layout: Layout, made: list[RanksOfTests]) -> object:
    """A function for Engine.start that makes the executor, and puts it into `made`."""

    def executor(config: WorkerConfig, report: ReportPhase) -> RanksOfTests:
        made.append(RanksOfTests(ranks, layout, config))
        return made[-1]

    return executor
