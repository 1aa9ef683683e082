"""Random schedules: the same requests at random moments, under random limits, in random layouts.

A schedule is made from its number alone, so one that shows a difference can be run again by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bits_subjects import MAX_LEN, VOCABULARY, Subject, subjects
from bits_traffic import Conversation, Result, Turn, write_traffic
from msgspec import structs
from ranks import Layout, Ranks, RanksOfTests, make
from scripted_speculator import ScriptedGuesser, use
from sizes import engine_config

from engine_core.engine import Engine
from engine_core.executor import MakeExecutor
from engine_core.protocol import AddRequest
from engine_core.scheduling.sequence import Sequence
from worker.devices.cpu import Cpu
from worker.protocol import Pooling, Sampling, TokenLogprobs
from worker.worker_facts import blocks_held

Truth = Callable[[int], list[int]]
"""The type of a function that returns the true answer to a request."""


class TruthGuesser(ScriptedGuesser):
    truth: Truth

    def guess(self, seq: Sequence, count: int) -> list[int]:
        done = len(seq.tokens) - seq.prompt_len
        right = self.truth(seq.id)[done : done + count]
        right += [self.random.randrange(VOCABULARY) for _ in range(count - len(right))]
        return [
            each if self.random.random() < self.chance else self.random.randrange(VOCABULARY)
            for each in right
        ]


@contextmanager
def guessing(random: Random, *, guesses: bool) -> Iterator[TruthGuesser | None]:
    """Let an engine that starts in this context guess, if its model takes guesses."""
    if not guesses:
        yield None
        return
    guesser = TruthGuesser(random, random.choice((1, 4, 8)), random.choice((0.3, 0.8, 0.95, 1.0)))
    with pytest.MonkeyPatch.context() as patch:
        use(patch, guesser)
        yield guesser


CONVERSATIONS = 24
"""The conversations of a model from which schedules draw theirs."""
DRAWN = 8
"""The conversations of a schedule."""
SHORT = 250
"""The tokens of conversations that are preempted often, when they share a cache that is made for one."""
REUSED = 6
"""The schedules that draw from the same conversations, before others are computed."""
ALONE = Layout()


@dataclass(frozen=True)
class Limits:
    """The options of an engine that must not change a bit."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_gpu_blocks_override: int
    steps_ahead: int
    enable_prefix_caching: bool
    long_prefill_token_threshold: int
    scheduling_policy: str
    max_token_gap_ms: float
    cpu_threads: int

    @classmethod
    def draw(cls, random: Random, subject: Subject, longest: int) -> Limits:
        """Limits under which sequences of up to `longest` tokens just fit, or more of them."""
        block_size = random.choice((4, 8, 16, 32, 64))
        tokens = random.choice((16, 17, 31, 48, 64, 100, 128, 200, 256, 333, 512))
        least = blocks_held(longest, tokens, block_size, subject.windows)
        return cls(
            max_model_len=longest,
            max_num_batched_tokens=tokens if subject.generates else MAX_LEN + tokens,
            max_num_seqs=min(tokens, random.choice((1, 2, 3, 5, 8, 8, 16, 32))),
            block_size=block_size,
            num_gpu_blocks_override=least + random.choice((0, 0, 1, least // 4, 3 * least)),
            steps_ahead=random.choice((0, 1, 1, 2)),
            enable_prefix_caching=random.random() < 0.8,
            long_prefill_token_threshold=random.choice((0, 0, 0, 7, 64)),
            scheduling_policy=random.choice(("fcfs", "priority")),
            max_token_gap_ms=random.choice((0.0, 2.0, 10.0)),
            cpu_threads=random.choice((1, 2, 3)),
        )


PLAINEST = Limits(
    max_model_len=MAX_LEN,
    max_num_batched_tokens=2 * MAX_LEN,
    max_num_seqs=1,
    block_size=16,
    num_gpu_blocks_override=-(-MAX_LEN // 16),
    steps_ahead=0,
    enable_prefix_caching=False,
    long_prefill_token_threshold=0,
    scheduling_policy="fcfs",
    max_token_gap_ms=0.0,
    cpu_threads=1,
)


@dataclass(frozen=True)
class Planned:
    """A conversation of a schedule: the steps after which its turns come, and when it is given up."""

    conversation: Conversation
    arrives: int
    pauses: list[int]
    """The steps between the end of each turn and the next."""
    aborted: tuple[int, int] | None
    """The turn that is aborted, and after how many steps."""
    priority: int
    streams: bool


@dataclass
class Tally:
    """The count of what was compared, and each difference in words."""

    schedules: int = 0
    results: int = 0
    floats: int = 0
    preemptions: int = 0
    cached: int = 0
    held: int = 0
    differences: list[str] = field(default_factory=list[str])


class Prover:
    """Runs schedules by their numbers and compares every result with the truth."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks | None = None,
        layouts: tuple[Layout, ...] = (),
        conversations: int = CONVERSATIONS,
    ) -> None:
        """`folder`: where checkpoints are written; `ranks`: the processes for `layouts`."""
        self._conversations = conversations
        self._folder = folder
        self._ranks = ranks
        self._layouts = layouts
        self._subjects = subjects()
        self._traffic: dict[Subject, tuple[int, list[Conversation]]] = {}
        self.tally = Tally()

    def run(self, number: int) -> None:
        subject = self._subjects[number % len(self._subjects)]
        traffic = self.traffic(subject, number // len(self._subjects) // REUSED)
        random = Random(f"schedule {number}")
        short = [each for each in traffic if max(turn.most_tokens for turn in each) < SHORT]
        few_tokens = random.random() < 0.4 and len(short) >= DRAWN
        conversations = random.sample(short if few_tokens else traffic, DRAWN)
        longest = max(turn.most_tokens for conversation in conversations for turn in conversation)
        limits = Limits.draw(random, subject, longest)
        recorded = random.random() < 0.7
        layout = random.choice(self._layouts) if self._layouts else ALONE
        planned = [_plan(random, conversation) for conversation in conversations]
        executor = self._executor(layout)
        opened = partial(open_engine, self._folder, subject, limits, layout, executor, recorded=recorded)
        with guessing(random, guesses=number % 4 != 3) as guesser, opened() as engine:
            guesses = guesser and f"{guesser.most} guesses, right {guesser.chance}"
            where = f"schedule {number}: {subject}, {layout}, recorded {recorded}, {limits}, {guesses}"
            run = _Run(engine, planned, self.tally, where)
            if guesser is not None:
                guesser.truth = run.truth
            run.finish()
        self.tally.schedules += 1

    def traffic(self, subject: Subject, generation: int) -> list[Conversation]:
        """The conversations from which some schedules of a model draw; generations have different ones."""
        held = self._traffic.get(subject)
        if held is None or held[0] != generation:
            random = Random(f"{subject} {generation}")
            blocks = len(subject.windows) * PLAINEST.num_gpu_blocks_override
            plainest = replace(PLAINEST, num_gpu_blocks_override=blocks)
            with open_engine(self._folder, subject, plainest) as engine:
                held = generation, write_traffic(random, subject, self._conversations, engine)
            self._traffic[subject] = held
        return held[1]

    def _executor(self, layout: Layout) -> MakeExecutor | None:
        if layout.size == 1 or self._ranks is None:
            return None
        made: list[RanksOfTests] = []
        return make(self._ranks, layout, made)  # pyright: ignore[reportReturnType]


@contextmanager
def open_engine(
    folder: Path,
    subject: Subject,
    limits: Limits,
    layout: Layout = ALONE,
    executor: MakeExecutor | None = None,
    *,
    recorded: bool = True,
) -> Iterator[Engine]:
    """An engine under these limits; `recorded`: whether small steps are replayed, if it has one rank."""
    options: dict[str, Any] = {**asdict(limits), **subject.options, "dtype": subject.dtype}
    if not subject.generates:
        options["enable_prefix_caching"] = False
    config = engine_config(
        subject.write(folder),
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.stages,
        **options,
    )
    with _recording(recorded):
        engine = Engine.start(config, lambda _: None, executor)
    try:
        yield engine
    finally:
        engine.stop()


def _plan(random: Random, conversation: Conversation) -> Planned:
    aborted = (random.randrange(len(conversation)), random.randrange(30)) if random.random() < 0.1 else None
    return Planned(
        conversation=conversation,
        arrives=random.choice((0, 0, 0, random.randrange(60))),
        pauses=[random.choice((0, 1, random.randrange(40))) for _ in conversation],
        aborted=aborted,
        priority=random.randrange(-1, 3),
        streams=random.random() < 0.5,
    )


class _Run:
    """One schedule on one engine."""

    def __init__(self, engine: Engine, planned: list[Planned], tally: Tally, where: str) -> None:
        self._engine = engine
        self._tally = tally
        self._where = where
        self._due: list[tuple[int, Callable[[], None]]] = []  # steps, and what is done after so many
        self._open: dict[int, tuple[Planned, int, Result]] = {}
        self._step = 0
        self._requests = 0
        for each in planned:
            self._later(each.arrives, each, 0)

    def finish(self) -> None:
        """Step until all conversations have ended."""
        while self._due or self._engine.busy:
            due = [act for step, act in self._due if step <= self._step]
            self._due = [(step, act) for step, act in self._due if step > self._step]
            for act in due:
                act()
            for answer in self._engine.step().get(0, []):
                planned, turn, result = self._open[answer.id]
                if result.take(answer):  # pyright: ignore[reportArgumentType]
                    del self._open[answer.id]
                    self._compare(planned, turn, result)
            self._step += 1
        stats = self._engine.stats()
        self._tally.preemptions += stats.preemptions
        self._tally.cached += stats.prefix_hits
        self._tally.held += sum(stats.guesses.held) if stats.guesses else 0

    def truth(self, id: int) -> list[int]:
        """The true tokens of an open request."""
        planned, turn, _ = self._open[id]
        return planned.conversation[turn].truth.tokens

    def _later(self, steps: int, planned: Planned, turn: int) -> None:
        self._due.append((self._step + steps, lambda: self._add(planned, turn)))

    def _add(self, planned: Planned, turn: int) -> None:
        id, asked = self._requests, planned.conversation[turn]
        self._requests += 1
        self._open[id] = planned, turn, Result()
        request = AddRequest(id, asked.prompt, asked.params, planned.priority, streams=planned.streams)
        self._engine.add(0, request)
        if planned.aborted is not None and planned.aborted[0] == turn:
            steps = self._step + planned.aborted[1]
            self._due.append((steps, lambda: self._engine.abort(0, [id])))

    def _compare(self, planned: Planned, turn: int, result: Result) -> None:
        asked = planned.conversation[turn]
        aborted = planned.aborted is not None and planned.aborted[0] == turn and result.finish != "pooled"
        self._tally.results += 1
        self._tally.floats += count_floats(asked, result)
        if words := difference(asked, result, aborted=aborted):
            self._tally.differences.append(
                f"{self._where}, turn {turn} of {len(asked.prompt)} tokens, "
                f"{options_of(asked.params)}: {words}"
            )
        elif turn + 1 < len(planned.conversation):
            self._later(planned.pauses[turn], planned, turn + 1)


def difference(asked: Turn, result: Result, *, aborted: bool) -> str:
    """The first thing that differs from the truth, in words; an aborted request may have less of it."""
    truth = asked.truth
    if aborted and (result.finish or "").startswith(("abort", "failed: the request was ended")):
        truth = Result(
            truth.tokens[: len(result.tokens)],
            truth.logprobs[: len(result.logprobs)],
            truth.prompt_logprobs if result.tokens else None,
            None,
            result.finish,
        )
    if (result.finish or "").startswith("failed") and not aborted:
        return f"it {result.finish}"
    for place, (one, other) in enumerate(zip(result.logprobs, truth.logprobs, strict=False)):
        if one != other:
            return f"logprobs of output {place}: {_shown(one)}, not {_shown(other)}"
    if result.tokens != truth.tokens:
        return f"tokens {result.tokens}, not {truth.tokens}"
    if result.prompt_logprobs != truth.prompt_logprobs:
        pairs = zip(result.prompt_logprobs or [], truth.prompt_logprobs or [], strict=False)
        places = [place for place, (one, other) in enumerate(pairs) if one != other]
        return f"prompt_logprobs at {places}"
    if result.vectors != truth.vectors:
        return "vectors"
    return "" if result.finish == truth.finish else f"it ended with {result.finish}, not {truth.finish}"


def options_of(params: Sampling | Pooling) -> str:
    """The options that a request does not leave as they are, without long lists."""
    values = {each.name: (getattr(params, each.name), each.default) for each in structs.fields(params)}
    given = [f"{name}={value!r:.20}" for name, (value, usual) in values.items() if value != usual]
    return f"{type(params).__name__}({', '.join(given)})"


def _shown(entry: TokenLogprobs) -> str:
    return f"{entry.ids[:3]} {[value.hex() for value in entry.values[:3]]} rank {entry.rank}"


def count_floats(asked: Turn, result: Result) -> int:
    """The count of the floats that are compared."""
    entries = [*result.logprobs, *(result.prompt_logprobs or [])]
    vectors = len(result.vectors.data) // 4 if result.vectors else 0
    return sum(len(entry.values) for entry in entries) + vectors


@contextmanager
def _recording(recorded: bool) -> Iterator[None]:
    """Let small steps be replayed by runners that are opened in this process, or not."""
    own = Cpu.quickened
    if not recorded:
        Cpu.quickened = lambda self, compute, groups: compute
    try:
        yield
    finally:
        Cpu.quickened = own
