"""Runs the steps of engines that share experts: all engines run a step at the same time, or none does.

Each engine has its own requests, scheduler and cache, but every layer of experts is computed by the ranks of
all engines together. So engines agree on rounds: whoever has planned a step announces it, and the others
announce theirs, or that they compute no tokens. Once an engine knows the tokens of all, it submits its step,
or an empty one. When none has anything to compute nothing is sent, and all sleep.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from math import ceil

import zmq
from msgspec.structs import replace

from engine_core.executor import CallFuture, Executor, ExecutorDead, OtherEngineDead, StepFuture
from engine_core.ranks.peers import Peers
from worker.calls.messages import WorkerCall
from worker.protocol import StepBounds, StepInput, StepOutput
from worker.ranks.unix_sockets import RankLostError
from worker.worker_facts import WorkerFacts

_log = logging.getLogger(__name__)


_LAG_SECONDS = 2.0
"""The longest time between the end of a rank and that of its engine."""


class JointExecutor:
    """Gives another executor each step when all engines have announced theirs of the same round."""

    def __init__(self, inner: Executor, index: int, peers: Peers) -> None:
        """`index` is the number of this engine."""
        self._inner = inner
        self._index = index
        self._peers = peers
        self._announced = 0
        self._waiting: deque[JointFuture] = deque()
        """Its steps of the last rounds, which not all others have announced."""
        self._poller = zmq.Poller()

    def start(self) -> WorkerFacts:
        try:
            return self._inner.start()
        except ExecutorDead as error:
            if RankLostError.__name__ in str(error):
                raise OtherEngineDead(
                    f"an engine that shares experts with this one has ended: {error}"
                ) from error
            raise

    @property
    def inner(self) -> Executor:
        """The executor of this engine's own ranks."""
        return self._inner

    def submit(self, step: StepInput, seconds: float = 0.0) -> JointFuture:
        """Announce a step, which usually ends within so many seconds, and run it when the others do."""
        self.check()
        self._announced += 1
        future = JointFuture(self, step, sum(seq.tokens for seq in step.seqs))
        self._waiting.append(future)
        self._peers.announce(self._announced, future.tokens, seconds)
        self.receive()
        return future

    def follow(self) -> JointFuture:
        """Take part in the next round without tokens. Only for a round that another engine has announced."""
        return self.submit(StepInput(number=-1 - self._announced, new=[], seqs=[]))

    @property
    def is_behind(self) -> bool:
        """Whether another engine has announced a round that this one has not."""
        return self._peers.announced > self._announced

    @property
    def slowest(self) -> float:
        """The seconds within which the longest of the last steps usually ends that others have announced."""
        return self._peers.slowest

    def leave(self) -> bool:
        """Say that this engine wants to end -> whether all do, so that none needs the experts here."""
        self._peers.leave()
        return self._peers.all_leave

    @property
    def first_leaves(self) -> bool:
        """Whether the first engine wants to end, if that is another one."""
        return self._peers.first_leaves

    def receive(self) -> None:
        """Read what others have announced, and submit the steps that may run. Raises ExecutorDead."""
        self._peers.receive()
        while self._waiting and (others := self._peers.take_round()) is not None:
            future = self._waiting.popleft()
            others[self._index] = future.tokens
            step = replace(future.step, replica_tokens=[others[number] for number in sorted(others)])
            try:
                future.running = self._inner.submit(step)
            except ExecutorDead as error:
                raise self.reason_of(error) from error
            if future.bounds is not None:
                self._inner.bind(future.bounds)

    def wait_for(self, future: JointFuture) -> None:
        """Return when a step is done, while others are submitted."""
        while True:
            self.register(self._poller)
            if future.done():
                return
            self._poller.poll()

    def bind(self, bounds: StepBounds) -> None:
        for future in self._waiting:
            if future.step.number == bounds.number:
                future.bounds = bounds
                return
        self._inner.bind(bounds)

    def idle(self, *, wait: bool = False) -> bool:
        """Nothing is prepared between steps: another engine may begin one at any time."""
        return False

    def call(self, call: WorkerCall) -> CallFuture:
        return self._inner.call(call)

    def stop(self) -> None:
        self._peers.close()
        self._inner.stop()

    def register(self, poller: zmq.Poller) -> None:
        self._peers.register(poller)
        self._inner.register(poller)

    def check(self) -> None:
        self._peers.receive()
        try:
            self._inner.check()
        except ExecutorDead as error:
            raise self.reason_of(error) from error

    def reason_of(self, error: ExecutorDead) -> ExecutorDead:
        """The end of another engine, if that is why ranks have ended, or else their own error.

        If they have felt the end of another engine's rank, that engine will end in a moment.
        """
        poller, felt = zmq.Poller(), RankLostError.__name__ in str(error)
        until = time.monotonic() + (_LAG_SECONDS if felt else 0.0)
        while True:
            try:
                self._peers.receive()
            except OtherEngineDead as lost:
                return lost
            if (left := until - time.monotonic()) <= 0:
                return error
            self._peers.register(poller)
            poller.poll(ceil(1000 * left))


@dataclass(slots=True, eq=False)
class JointFuture:
    """The output of a step that runs when all engines have announced theirs."""

    executor: JointExecutor
    step: StepInput
    tokens: int
    bounds: StepBounds | None = None
    """Its bounds, if they were known before it could run."""
    running: StepFuture | None = None

    def done(self) -> bool:
        self.executor.receive()  # or who waits for it now waits for news that were read elsewhere
        try:
            return self.running is not None and self.running.done()
        except ExecutorDead as error:
            raise self.executor.reason_of(error) from error

    def result(self) -> StepOutput:
        self.executor.wait_for(self)
        if self.running is None:
            raise RuntimeError("a step is done that was not submitted")
        try:
            return self.running.result()
        except ExecutorDead as error:
            raise self.executor.reason_of(error) from error
        except Exception as error:
            raise ExecutorDead(f"a step failed in which other engines take part: {error}") from error
