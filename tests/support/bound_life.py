"""An engine whose worker waits for bounds, all that its clients are told, and checks of both."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import zmq
from fake_worker import VOCAB, FakeWorker, reference
from model_facts import READY
from no_calls import NoCalls
from scheduler_bench import config
from toy_language import Language, ToyMatcher

from engine_core.engine import Engine
from engine_core.features.installed import make_scheduler
from engine_core.protocol import AddRequest, Failed, OutputsByClient, Tokens
from worker.protocol import Sampling, StepBounds, StepInput, StepOutput
from worker.worker_facts import WorkerFacts

POISON = 45
"""A prompt that begins with this token makes each of its steps fail."""


class Deadlock(BaseException):
    """A step waits for bounds that nobody tells. It is no error of a step, so no engine catches it."""


@dataclass
class BoundExecutor(NoCalls):
    """Computes steps in order, each when its outcome is asked for, and bounds must have been told by then."""

    facts: WorkerFacts
    failing: set[int] = field(default_factory=set)
    """Steps that fail: negative numbers before they ask for their bounds, others after it."""
    busy: deque[bool] = field(default_factory=deque)
    """Answers to `done`, before all is done."""
    submitted: list[StepInput] = field(default_factory=list)
    told: list[StepBounds] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = FakeWorker(self.facts)
        self.queue: deque[StepBounds] = deque()
        self.due: deque[tuple[StepInput, BoundStep]] = deque()
        self.poisoned: set[int] = set()

    def start(self) -> WorkerFacts:
        return self.facts

    def submit(self, step: StepInput) -> BoundStep:
        self.submitted.append(step)
        future = BoundStep(self)
        self.due.append((step, future))
        return future

    def idle(self, *, wait: bool = False) -> bool:
        return False

    def bind(self, bounds: StepBounds) -> None:
        assert bounds.number <= self.submitted[-1].number, "bounds come before their step"
        self.told.append(bounds)
        self.queue.append(bounds)

    def compute(self) -> None:
        """Compute the oldest step."""
        step, future = self.due.popleft()
        for new in step.new:
            (self.poisoned.add if new.tokens[0] == POISON else self.poisoned.discard)(new.slot)
        try:
            if -step.number in self.failing:
                raise RuntimeError("a fault before the bounds")
            future.outcome = self.worker.launch(step, self.following).output
            if step.number in self.failing or any(row.slot in self.poisoned for row in step.seqs):
                raise RuntimeError("a fault behind the bounds")
        except Exception as error:
            self.worker.failed = True
            future.outcome = error

    def following(self) -> StepBounds:
        if not self.queue:
            raise Deadlock
        return self.queue.popleft()

    def register(self, poller: zmq.Poller) -> None: ...

    def check(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class BoundStep:
    executor: BoundExecutor
    outcome: StepOutput | Exception | None = None

    def done(self) -> bool:
        return not (self.executor.busy and self.executor.busy.popleft())

    def result(self) -> StepOutput:
        while self.outcome is None:
            self.executor.compute()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class Life:
    """An engine, and all that is told to clients."""

    engine: Engine
    executor: BoundExecutor
    requests: dict[int, AddRequest] = field(default_factory=dict)
    languages: dict[int, Language | None] = field(default_factory=dict)
    matchers: dict[int, ToyMatcher] = field(default_factory=dict)
    answers: dict[int, list[Tokens | Failed]] = field(default_factory=dict)

    @classmethod
    def of(cls, executor: BoundExecutor, **options: object) -> Life:
        scheduler = make_scheduler(config(**options), executor.facts, VOCAB)
        return cls(Engine(READY, scheduler, executor), executor)

    def add(self, request: AddRequest, language: Language | None, slow: frozenset[int] = frozenset()) -> None:
        self.requests[request.id], self.languages[request.id] = request, language
        matcher = None
        if language is not None:
            matcher = self.matchers[request.id] = ToyMatcher(language, slow=slow)
        self.engine.intake.add(0, request, matcher)

    def run(self) -> None:
        while self.engine.busy:
            self.step(wait=True)

    def step(self, *, wait: bool) -> None:
        self.collect(self.engine.step(wait=wait))

    def collect(self, outputs: OutputsByClient) -> None:
        for output in outputs.get(0, []):
            if isinstance(output, Tokens | Failed):
                self.answers.setdefault(output.id, []).append(output)

    def text(self, id: int) -> list[int]:
        return [token for each in self.answers[id] if isinstance(each, Tokens) for token in each.tokens]

    def check(self, aborted: set[int]) -> None:
        assert [each.number for each in self.executor.told] == [
            step.number for step in self.executor.submitted if any(row.bound for row in step.seqs)
        ]
        steps = {step.number: step for step in self.executor.submitted}
        for each in self.executor.told:
            bound = [row for row in steps[each.number].seqs if row.bound]
            assert each.rows.keys() == {row.slot for row in bound}
            guesses = {row.slot: len(row.guesses) for row in bound if row.guesses}
            assert {slot: len(behind) for slot, behind in each.guesses.items()} == guesses
        assert sorted(self.answers) == sorted(self.requests)
        for id, request in self.requests.items():
            self.check_answer(request, self.languages[id], aborted=id in aborted)

    def check_answer(self, request: AddRequest, language: Language | None, *, aborted: bool) -> None:
        *before, last = self.answers[request.id]
        assert all(isinstance(each, Tokens) and each.finish is None for each in before)
        assert isinstance(last, Failed) or last.finish is not None
        params = request.params
        assert isinstance(params, Sampling)
        text, prompt = self.text(request.id), request.tokens[: request.prompt_len or len(request.tokens)]
        text = request.tokens[len(prompt) :] + text
        if language is None:
            expected = reference(prompt, params.max_tokens)
        else:
            assert language.holds(text)
            expected = language.reference(prompt, params.max_tokens)
        if isinstance(last, Failed):
            gave_up = language is not None and language.breaks and last.code == 400
            assert gave_up or last.code == 500
            if gave_up and language is not None:
                assert len(language.written(text) or []) == abs(language.breaks) - 1
            assert text == expected[: len(text)]
        elif aborted and last.finish == "abort":
            assert text == expected[: len(text)]
        else:
            assert text == expected
            written = None if language is None else language.written(text)
            complete = language is not None and written is not None and language.complete(written)
            assert last.finish == ("stop" if complete else "length")
