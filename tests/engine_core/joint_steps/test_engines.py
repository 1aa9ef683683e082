"""Engines that share experts: whatever comes first, texts and rounds are right, and none waits for ever."""

from __future__ import annotations

import random
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from typing import Any

import pytest
import zmq
from fake_worker import VOCAB, FakeWorker, facts, reference
from model_facts import READY
from no_calls import NoCalls
from sizes import engine_config
from toy_language import Language, ToyMatcher

from engine_core.engine import Engine
from engine_core.executor import ExecutorDead
from engine_core.features.installed import make_scheduler
from engine_core.grammar.matcher import TokenMatcher
from engine_core.protocol import AddRequest, Failed, OutputsByClient, Tokens
from engine_core.ranks.joint_executor import JointExecutor
from engine_core.ranks.peers import Peers
from worker.protocol import Sampling, StepBounds, StepInput, StepOutput
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


Make = Callable[..., Group]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Group] = []

    def make(size: int, seed: int = 0, given: WorkerFacts | None = None, **options: Any) -> Group:
        made.append(Group([given or facts()] * size, seed, **options))
        return made[-1]

    yield make
    for group in made:
        group.close()


def add(id: int, tokens: list[int], max_tokens: int = 6) -> AddRequest:
    return AddRequest(id=id, tokens=tokens, params=Sampling(max_tokens=max_tokens))


@pytest.mark.parametrize("ahead", [0, 1, 2, None])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_and_go_anywhere_get_their_texts(
    make: Make, seed: int, size: int, ahead: int | None
) -> None:
    draw = random.Random(seed)
    small = facts(num_blocks=12, max_num_seqs=3, max_num_batched_tokens=9, max_model_len=40)
    group = make(size, seed, small, steps_ahead=ahead)
    language, asked, aborted = Language(shortest=5, width=20), dict[int, AddRequest](), set[int]()
    for id in range(14):
        prompt = [draw.randrange(1, 40) for _ in range(draw.choice([1, 2, 5, 14]))]
        asked[id] = add(id, prompt, draw.choice([1, 4, 12, 20]))
        index = draw.randrange(size)
        group.add(index, asked[id], ToyMatcher(language) if id % 3 == 2 else None)
        if draw.random() < 0.2:
            aborted.add(id)
            group.engines[index].abort(0, [id])
        for _ in range(draw.choice([0, 3, 30, 1000])):
            group.turn()
    group.run()
    for id, request in asked.items():
        last = group.answers[id][-1]
        assert isinstance(last, Tokens) and last.finish is not None
        most = 20 if not isinstance(request.params, Sampling) else request.params.max_tokens
        whole = (language.reference if id % 3 == 2 else reference)(request.tokens, most)
        assert group.text(id) == (whole[: len(group.text(id))] if id in aborted else whole)
    assert all(any(tokens) for tokens in group.rounds), "nobody begins a round that has no tokens"
    assert all(engine.idle for engine in group.engines)


def test_memory_that_runs_out_in_one_engine_is_its_own_affair(make: Make) -> None:
    group = make(2, 1, facts(num_blocks=8, max_model_len=32), steps_ahead=1)
    for id in range(6):
        group.add(id % 2, add(id, [id + 1, 2, 3], max_tokens=20))
    group.run()
    assert any(engine.stats().preemptions for engine in group.engines)
    for id in range(6):
        assert group.text(id) == reference([id + 1, 2, 3], 20)
    assert len(group.rounds) >= 60 / 3


@pytest.mark.parametrize("seed", range(6))
def test_one_that_does_not_plan_ahead_takes_part_in_every_round_of_one_that_does(
    make: Make, seed: int
) -> None:
    group = make(2, seed, steps_ahead=[1, 0])
    group.add(0, add(0, [1, 2], 30))
    group.add(1, add(1, [3, 4], 30))
    group.run()
    own = [tokens[1] for tokens in group.rounds]
    begun = own.index(2)
    assert own[begun : begun + 30] == [2, *[1] * 29], "no round between its steps goes on without it"


def test_a_request_that_comes_to_an_idle_engine_is_in_a_round_soon(make: Make) -> None:
    group = make(2, 3, steps_ahead=1)
    group.add(0, add(0, [1, 2], 40))
    while len(group.rounds) < 9:
        group.turn()
    assert [tokens[1] for tokens in group.rounds] == [0] * 9
    group.add(1, add(1, [5, 6], 4))
    group.run()
    assert group.text(1) == reference([5, 6], 4)
    own = [tokens[1] for tokens in group.rounds]
    assert own.index(2) <= 12, "two steps may be under way, and one announced"
    assert len(own) <= 42, "it takes part beside the other, and not instead"


def test_nobody_begins_a_round_while_there_is_nothing_to_compute(make: Make) -> None:
    group = make(3)
    group.run()
    assert group.rounds == []
    group.add(2, add(0, [1], 2))
    group.run()
    assert [tokens[:2] for tokens in group.rounds] == [[0, 0]] * 2
    assert not any(group.awake(index) for index in range(3))


def test_engines_that_drain_end_when_all_have_nothing_left(make: Make) -> None:
    group = make(3, steps_ahead=1)
    group.add(0, add(0, [1, 2], 30))
    group.add(1, add(1, [3], 4))
    for engine in group.engines[1:]:
        engine.drain()
        assert not engine.leave(inf)
    group.run()
    assert group.text(0) == reference([1, 2], 30) and group.text(1) == reference([3], 4)
    assert group.left == set(), "the first one has not been asked to end"
    group.add(0, add(2, [7, 8], 5))
    group.add(1, add(3, [7, 8], 5))
    group.engines[0].drain()
    assert not group.engines[0].leave(inf)
    group.run()
    assert group.text(2) == reference([7, 8], 5)
    (refused,) = group.answers[3]
    assert isinstance(refused, Failed) and refused.code == 503
    assert group.left == {0, 1, 2}


@pytest.mark.parametrize("busy", [False, True])
def test_the_end_of_one_is_noticed_by_others_that_sleep_or_wait(make: Make, *, busy: bool) -> None:
    group = make(3)
    group.run()
    if busy:
        group.add(0, add(0, [1], 2))
    while group.awake(0):
        group.engines[0].step(wait=False)
    group.engines[2].stop()
    group.left.add(2)
    for index in range(2):
        with pytest.raises(ExecutorDead, match=r"engine 2, which shares experts with this one, has ended"):
            assert group.awake(index)
            group.engines[index].check()


def test_one_that_ends_while_another_is_not_done_is_missed(make: Make) -> None:
    group = make(2)
    group.engines[1].drain()
    assert not group.engines[1].leave(inf)
    group.engines[1].stop()
    group.left.add(1)
    with pytest.raises(ExecutorDead, match="engine 1"):
        group.run()


def test_a_step_that_fails_ends_its_engine(make: Make) -> None:
    group = make(2)
    group.add(0, add(0, [1], 2))
    group.executors[0].fault = "odd input"
    with pytest.raises(ExecutorDead, match="other engines take part: odd input"):
        group.run()
