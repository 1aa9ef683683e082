"""Requests through the scheduler and a worker, in this process, as an engine runs them.

It takes the part of `engine_core/engine.py`, whose sockets need a package that a machine with a card may not
have.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_core.config import EngineConfig
from engine_core.features.installed import make_scheduler
from engine_core.protocol import AddRequest, Failed, Tokens
from worker.protocol import StepInput, StepOutput
from worker.worker_facts import WorkerFacts

_CLIENT = 0


class Handle(Protocol):
    """A step that a worker has begun."""

    def result(self) -> StepOutput: ...


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    """The log-probabilities of the tokens, if they are asked for."""
    finish: str = ""
    """Why it ended; empty: it has not."""
    ends: int = 0
    """How often it was told to have ended."""


class Loop:
    """Runs requests with so many steps planned ahead."""

    def __init__(
        self,
        launch: Callable[[StepInput], Handle],
        facts: WorkerFacts,
        vocabulary: int,
        steps_ahead: int = 1,
        **asked: Any,
    ) -> None:
        """`launch` begins a step on the worker that has these facts. `asked`: options of the engine."""
        config = EngineConfig(model="dummy", steps_ahead=steps_ahead, **asked)
        self._launch = launch
        self.scheduler = make_scheduler(config, facts, vocabulary)
        self.answers: dict[int, Answer] = {}
        self.compilations = facts.kernel_compilations
        """The kernels that the worker has compiled so far."""
        self._in_flight: deque[tuple[Any, Any]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.live or self._in_flight)

    def add(self, request: AddRequest) -> None:
        self.answers[request.id] = Answer()
        told = self.scheduler.add(_CLIENT, request, time.monotonic())
        if isinstance(told, Failed):
            self._take([told])

    def abort(self, id: int) -> None:
        outputs = self.scheduler.abort([(_CLIENT, id)], time.monotonic())
        self._take(outputs.get(_CLIENT, []))

    def step(self) -> None:
        """Plan a step, if another one may be in flight; else wait for the oldest."""
        scheduler, planned = self.scheduler, None
        if self._may_plan and (planned := scheduler.schedule(time.monotonic())) is not None:
            self._in_flight.append((planned, self._launch(planned.step)))
        if self._in_flight and (planned is None or not self._may_plan):
            oldest, handle = self._in_flight.popleft()
            output = handle.result()
            self.compilations = output.kernel_compilations
            self._take(scheduler.results.land(oldest, output, time.monotonic()).get(_CLIENT, []))

    def run(self, requests: Iterable[AddRequest]) -> list[list[int]]:
        """Answer requests that come all at once -> the tokens of each."""
        requests = list(requests)
        for request in requests:
            self.add(request)
        while self.busy:
            self.step()
        return [self.answers[request.id].tokens for request in requests]

    @property
    def _may_plan(self) -> bool:
        count = len(self._in_flight)
        return count < self.scheduler.depth and self.scheduler.may_plan(count)

    def _take(self, outputs: list[Any]) -> None:
        for output in outputs:
            match output:
                case Tokens():
                    answer = self.answers[output.id]
                    answer.tokens += output.tokens
                    answer.logprobs += [each.values[0] for each in output.logprobs]
                    answer.finish, ended = output.finish or "", bool(output.finish)
                case Failed():
                    answer, ended = self.answers[output.id], True
                    answer.finish = f"failed: {output.message}"
                case _:
                    continue
            answer.ends += ended
