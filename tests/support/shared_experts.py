"""Engines that share experts, in one thread: each is stepped when its process would wake, in a random order.

The workers are fake. A step of one can land when the workers of all engines have begun theirs of the same
round, as with real experts, and then lands when the test lets it.
"""

from __future__ import annotations

import random
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf

import zmq
from fake_worker import VOCAB, FakeWorker
from model_facts import READY
from no_calls import NoCalls
from sizes import engine_config

from engine_core.engine import Engine
from engine_core.features.installed import make_scheduler
from engine_core.grammar.matcher import TokenMatcher
from engine_core.protocol import AddRequest, Failed, OutputsByClient, Tokens
from engine_core.ranks.joint_executor import JointExecutor
from engine_core.ranks.peers import Peers
from worker.protocol import StepBounds, StepInput, StepOutput
from worker.worker_facts import WorkerFacts


class SharingExecutor(NoCalls):
    """The executor of one engine, whose steps land as the test lets them."""

    def __init__(self, facts: WorkerFacts, all_begun: Callable[[int], bool]) -> None:
        """`all_begun` tells whether every engine has begun its step of a round."""
        self.steps: list[StepInput] = []
        """Every step that was submitted: its place is its round."""
        self.landed = 0
        """The rounds that have landed."""
        self.worker = FakeWorker(facts)
        self.outputs: list[StepOutput] = []
        self.fault = ""
        """The reason for which steps fail from now on."""
        self.bounds: deque[StepBounds] = deque()
        self._all_begun = all_begun
        self._notice, self._other_end = socket.socketpair()
        for end in (self._notice, self._other_end):
            end.setblocking(False)

    def start(self) -> WorkerFacts:
        return self.worker.facts

    def submit(self, step: StepInput) -> SharedStep:
        self.steps.append(step)
        return SharedStep(self, len(self.steps) - 1)

    def bind(self, bounds: StepBounds) -> None:
        assert bounds.number <= self.steps[-1].number, "bounds come before their step"
        self.bounds.append(bounds)

    @property
    def may_land(self) -> bool:
        """Whether the oldest step could end now."""
        if self.landed == len(self.steps) or not self._all_begun(self.landed):
            return False
        return bool(self.bounds) or not any(seq.bound for seq in self.steps[self.landed].seqs)

    def land(self) -> None:
        landed = self.worker.launch(self.steps[self.landed], self.bounds.popleft)
        self.landed += 1
        self.outputs.append(landed.result())
        self._other_end.send(b"\0")

    def idle(self, *, wait: bool = False) -> bool:
        raise AssertionError("ranks that share experts prepare nothing by themselves")

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._notice, zmq.POLLIN)
        with suppress(BlockingIOError):
            self._notice.recv(4096)

    def check(self) -> None: ...

    def stop(self) -> None:
        for end in (self._notice, self._other_end):
            end.close()


class SharedStep:
    def __init__(self, executor: SharingExecutor, index: int) -> None:
        self._executor = executor
        self._index = index

    def done(self) -> bool:
        return self._index < self._executor.landed

    def result(self) -> StepOutput:
        assert self.done(), "nobody may wait for a step here"
        if self._executor.fault:
            raise RuntimeError(self._executor.fault)
        return self._executor.outputs[self._index]


class Group:
    """Some engines that share experts, and what they have answered."""

    def __init__(
        self,
        facts: list[WorkerFacts],
        seed: int,
        **options: object,
    ) -> None:
        """`facts`: those of each engine's worker. `options` are the engines', and lists give each its own."""
        self.random = random.Random(seed)
        self.executors = [SharingExecutor(each, self._all_begun) for each in facts]
        sockets: list[dict[int, socket.socket]] = [{} for _ in facts]
        for a in range(len(facts)):
            for b in range(a):
                sockets[a][b], sockets[b][a] = socket.socketpair()
                sockets[a][b].setblocking(False)
                sockets[b][a].setblocking(False)
        self.engines = [self._engine(index, sockets[index], options) for index in range(len(facts))]
        self.answers: dict[int, list[Tokens | Failed]] = {}
        self.left: set[int] = set()
        """The engines that have ended."""
        self._pollers = [zmq.Poller() for _ in facts]

    def _engine(self, index: int, sockets: dict[int, socket.socket], options: dict[str, object]) -> Engine:
        own = {name: each[index] if isinstance(each, list) else each for name, each in options.items()}
        executor = JointExecutor(self.executors[index], index, Peers(sockets))
        facts = executor.start()
        return Engine(READY, make_scheduler(engine_config("", **own), facts, VOCAB), executor)

    def _all_begun(self, number: int) -> bool:
        return all(len(executor.steps) > number for executor in self.executors)

    def add(self, index: int, request: AddRequest, matcher: TokenMatcher | None = None) -> None:
        engine = self.engines[index]
        engine.add(0, request) if matcher is None else engine.intake.add(0, request, matcher)

    def turn(self) -> bool:
        """Let one engine do something, or a step land; returns False if all sleep."""
        awake: list[Callable[[], None]] = [
            lambda index=index: self._step(index)
            for index in range(len(self.engines))
            if index not in self.left and self.awake(index)
        ]
        awake += [executor.land for executor in self.executors if executor.may_land]
        if not awake:
            return False
        self.random.choice(awake)()
        return True

    def awake(self, index: int) -> bool:
        """Whether the process of an engine would not sleep now."""
        engine, poller = self.engines[index], self._pollers[index]
        engine.register(poller)
        asleep = engine.idle or engine.waits
        return bool(poller.poll(0)) or not asleep

    def _step(self, index: int) -> None:
        engine = self.engines[index]
        engine.check()
        self._collect(engine.step(wait=False))
        if engine.refusal is not None and engine.leave(inf):
            engine.stop()
            self.left.add(index)

    def _collect(self, outputs: OutputsByClient) -> None:
        for output in outputs.get(0, []):
            assert isinstance(output, Tokens | Failed)
            self.answers.setdefault(output.id, []).append(output)

    def run(self) -> None:
        """Go on until all sleep."""
        while self.turn():
            pass

    def text(self, id: int) -> list[int]:
        return [token for each in self.answers[id] if isinstance(each, Tokens) for token in each.tokens]

    @property
    def rounds(self) -> list[list[int]]:
        """The tokens of each engine in every round that all have begun, which all were told alike."""
        told = [[step.replica_tokens for step in executor.steps] for executor in self.executors]
        common = min(told, key=len)
        assert all(each[: len(common)] == common for each in told)
        for index, executor in enumerate(self.executors):
            own = [sum(seq.count for seq in step.seqs) for step in executor.steps]
            assert own == [tokens[index] for tokens in told[index]]
        return common

    def close(self) -> None:
        for index, engine in enumerate(self.engines):
            if index not in self.left:
                engine.stop()
