"""A scheduler, a worker without tensors, and the steps between them: an engine without errors and time."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from fake_worker import FakeWorker, Landed

from engine_core.config import EngineConfig
from engine_core.features.grammar.answer_bounds import AnswerBounds
from engine_core.features.installed import make_scheduler
from engine_core.features.media.media_items import MediaItems
from engine_core.features.media.source_blocks import SourceBlocks
from engine_core.grammar.matcher import TokenMatcher
from engine_core.protocol import AddRequest, Admitted, Failed, OutputsByClient, Pooled, Tokens
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.planned_step import PlannedStep
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Key, Place
from worker.protocol import Pooling, Sampling
from worker.worker_facts import WorkerFacts

T = TypeVar("T", bound=Feature)


def config(**changes: object) -> EngineConfig:
    return EngineConfig(model="fake", **changes)  # pyright: ignore[reportArgumentType]


_OF_ADD = (
    *("priority", "salt", "group", "streams", "times_each"),
    *("owner", "weight", "max_running", "wait", "budget", "prompt_len", "media"),
    *("most_guesses", "reports_guesses", "thinking", "source", "shared"),
)


def add(id: int, tokens: list[int], max_tokens: int = 4, **changes: object) -> AddRequest:
    named = {name: changes.pop(name) for name in _OF_ADD if name in changes}
    return AddRequest(id=id, tokens=tokens, params=Sampling(max_tokens=max_tokens, **changes), **named)  # pyright: ignore[reportArgumentType]


def pool(id: int, tokens: list[int], task: str = "embed", **changes: object) -> AddRequest:
    named = {name: changes.pop(name) for name in _OF_ADD if name in changes}
    return AddRequest(id=id, tokens=tokens, params=Pooling(task=task, **changes), **named)  # pyright: ignore[reportArgumentType]


def add_to(
    scheduler: Scheduler, client: int, request: AddRequest, now: float, matcher: TokenMatcher | None = None
) -> Admitted | Tokens | Failed | None:
    """Add a request whose answer this matcher follows, if there is one."""
    if matcher is None:
        return scheduler.add(client, request, now)
    return scheduler.hooks.get(AnswerBounds).add(client, request, now, matcher)


@dataclass
class Bench:
    config: EngineConfig
    facts: WorkerFacts
    depth: int = 0
    """The number of steps that are planned beyond the oldest that has not landed."""
    outputs: dict[Key, list[Tokens | Pooled | Failed]] = field(default_factory=dict)
    in_flight: deque[tuple[PlannedStep, Landed]] = field(default_factory=deque)
    now: float = 0.0
    rows: list[int] = field(default_factory=list)
    """The tokens of each row of the step that was planned last."""

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.config, self.facts, vocab_size=50)
        self.worker = FakeWorker(self.facts)
        self.worker.media.whole |= self.config.disable_chunked_mm_input

    def find(self, kind: type[T]) -> T:
        """The installed feature of a class."""
        found = self.scheduler.hooks.find(kind)
        assert found is not None
        return found

    @property
    def media(self) -> MediaItems:
        return self.find(MediaItems)

    @property
    def sources(self) -> SourceBlocks:
        return self.find(SourceBlocks)

    def add(self, request: AddRequest, client: int = 0, matcher: TokenMatcher | None = None) -> None:
        self.now += 1
        answer = add_to(self.scheduler, client, request, self.now, matcher)
        self.collect({client: [answer]} if isinstance(answer, Failed) else {})

    def add_all(self, requests: Iterable[AddRequest]) -> None:
        for request in requests:
            self.add(request)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def serve(self, request: AddRequest, client: int = 0) -> None:
        """Add a request, and run all that there are."""
        self.add(request, client)
        self.run()

    def all_rows(self) -> list[list[int]]:
        """Run all; returns the rows of each step."""
        rows: list[list[int]] = []
        while self.step():
            rows.append(self.rows)
        return rows

    def abort(self, *keys: Key) -> None:
        self.collect(self.scheduler.abort(keys, self.now))

    def step(self) -> bool:
        """Plan a step, or let one land; False if there was nothing to do."""
        self.now += 1
        full = len(self.in_flight) > self.depth or not self.scheduler.may_plan(len(self.in_flight))
        plan = None if full else self.scheduler.schedule(self.now)
        if plan is not None:
            self.check_stages(plan)
            self.rows = [row.tokens for row in plan.step.seqs]
            self.in_flight.append((plan, self.launch(plan)))
        if len(self.in_flight) > self.depth or (plan is None and self.in_flight):
            plan, landed = self.in_flight.popleft()
            self.collect(self.scheduler.results.land(plan, landed.result(), self.now))
        elif plan is None:
            return False
        self.check()
        if not self.scheduler.live:
            assert not any(getattr(each, "bytes", 0) for each in self.scheduler.hooks.features)
        return True

    def launch(self, plan: PlannedStep) -> Landed:
        """Compute a step, whose bounds are made if it has some: all that they depend on has landed."""
        outputs: OutputsByClient = {}
        bounds = self.scheduler.bind(plan, outputs) if plan.binds else None
        self.collect(outputs)
        return self.worker.launch(plan.step, None if bounds is None else lambda: bounds)

    def run(self) -> None:
        while self.step():
            pass
        assert not self.scheduler.live, "stuck"
        self.check()

    def collect(self, outputs: OutputsByClient) -> None:
        for client, told in outputs.items():
            for output in told:
                self.outputs.setdefault((client, output.id), []).append(output)  # pyright: ignore[reportArgumentType]

    def check(self) -> None:
        """Assert that nothing leaks: blocks count the sequences that hold them, and slots have one owner."""
        scheduler = self.scheduler
        scratch = self.facts.num_blocks
        tables = [table for seq in scheduler.running for table in seq.tables]
        users = Counter(block for table in tables for block in table if block != scratch)
        assert all(
            scheduler.cache.pool.users(block) == users[block] for block in range(self.facts.num_blocks)
        )
        assert scheduler.cache.pool.free == self.facts.num_blocks - len(users)
        size, planned = self.facts.block_size, (self.depth + 1) * self.facts.max_num_batched_tokens
        for group, window in enumerate(self.facts.windows):
            held = [sum(block != scratch for block in seq.tables[group]) for seq in scheduler.running]
            assert not window or max(held, default=0) <= -(-(window + planned) // size) + 1
        slots = [seq.slot for seq in scheduler.running] + scheduler.cache.free_slots
        assert Counter(slots) == Counter(range(self.facts.max_num_seqs))
        parked = [seq for seq in scheduler.paused if seq.place is not Place.RUNNING]
        assert len(scheduler.live) == len(scheduler.running) + scheduler.waiting.count + len(parked)

    def check_stages(self, plan: PlannedStep) -> None:
        """Assert that the first of several stages gets no token that the last one has not sampled."""
        if self.config.pipeline_parallel_size > 1:
            for seq, row in zip(plan.seqs, plan.step.seqs, strict=True):
                assert row.start + row.count <= len(seq.tokens)

    def text(self, id: int, client: int = 0) -> list[int]:
        """All tokens of a request, which has ended, and whose last output alone says so."""
        *before, last = self.outputs[client, id]
        assert isinstance(last, Tokens) and last.finish is not None
        assert not any(isinstance(output, Failed | Pooled) or output.finish for output in before)
        return [token for output in [*before, last] for token in output.tokens]

    def pooled(self, id: int, client: int = 0) -> Pooled:
        (only,) = self.outputs[client, id]
        assert isinstance(only, Pooled)
        return only

    def last(self, id: int, client: int = 0) -> Tokens:
        last = self.outputs[client, id][-1]
        assert isinstance(last, Tokens)
        return last

    def preemptions(self, id: int) -> int:
        timing = self.last(id).timing
        assert timing is not None
        return timing.preemptions

    def cached(self, id: int) -> int:
        first = self.outputs[0, id][0]
        assert isinstance(first, Tokens)
        return first.cached
