"""A worker without tensors, whose cache entries depend on their prefix as real K and V do.

A wrong block, row, offset, order or stale prefix changes the text that comes out. It keeps to the same
contract as the real one: token values are known from NewSeq and from its own samples only, and a step is
computed when it is launched. Run as a module, it is an engine process with this worker in it.
"""

import os
import signal
import socket
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import zmq
from fake_adapters import CalledBefore, FakeAdapters
from fake_cache import FakeCache, entries_of, sum_up
from fake_drafts import bounds_of, nearest, run_drafter, run_rows
from fake_media import FakeMedia
from fake_sources import FakeSources
from fake_states import FakeStates
from fake_steps import DueStep, Landed, SlowStep
from no_calls import NoCalls

from engine_core import engine_main
from engine_core.executor import ExecutorDead
from worker.calls.messages import WorkerCall
from worker.config import WorkerConfig
from worker.protocol import (
    QUERY_GONE,
    Bound,
    NewSeq,
    Pooling,
    SeqStep,
    StepBounds,
    StepInput,
    StepOutput,
    TokenLogprobs,
    Vectors,
)
from worker.worker_facts import WorkerFacts

VOCAB = 50
EOS = 0

# Token ids that make an engine process with this worker misbehave when a prompt holds them.
BREAKS_STEP = 41
BREAKS_ROW = 42
KILLS_PROCESS = 43
LOSES_DEVICE = 44
SLOW_STEP = 45
HANGS_STEP = 46

WHOLE_TASKS = ("token_embed",)


def _attend(entries: list[int | None]) -> int:
    return sum_up(entries) % VOCAB


def text_after(tokens: Iterable[int]) -> int:
    """The token that follows these tokens: the reference, without cache, blocks or steps."""
    return _attend(entries_of(tokens))


def reference(
    prompt: list[int], max_tokens: int, stops: tuple[int, ...] = (), min_tokens: int = 0
) -> list[int]:
    """The tokens that a request must produce when it runs alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(text_after(tokens))
        if tokens[-1] in stops and len(tokens) - 1 - len(prompt) >= min_tokens:
            break
    return tokens[len(prompt) :]


def allowed_ids(bound: Bound | None) -> list[int]:
    """The tokens within bounds, all of them if there are none."""
    if bound is None:
        return list(range(VOCAB))
    if bound.form == "bits":
        bits = int.from_bytes(bound.data, "little")
        return [token for token in range(VOCAB) if bits >> token & 1]
    ids = array("i", bound.data).tolist()
    return ids if bound.form == "allowed" else [token for token in range(VOCAB) if token not in ids]


def vectors_of(tokens: list[int], params: Pooling) -> Vectors:
    """The vectors that a pooling request must get, made of the last position only, or of all."""
    return _pool(entries_of(tokens), params)


def _pool(entries: list[int | None], params: Pooling) -> Vectors:
    if params.task in WHOLE_TASKS:
        return Vectors(array("f", [_attend(entries), len(entries)]).tobytes(), (2,))
    return Vectors(array("f", [(entries[-1] or 0) % 1000]).tobytes(), (1,))


def facts(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    tasks: tuple[str, ...] = ("generate", "embed", "token_embed"),
    causal: bool = True,
    has_idle_work: bool = False,
    remembered_states: int | None = None,
    windows: tuple[int, ...] = (0,),
    most_embeddings: int = 0,
    kept_embeddings: int = 0,
    whole_media: bool = False,
    most_rows: int = 0,
) -> WorkerFacts:
    return WorkerFacts(
        device="fake",
        dtype="float32",
        block_size=block_size,
        num_blocks=num_blocks if causal else 0,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        weight_bytes=0,
        kv_bytes=0,
        tasks=tasks,
        causal=causal,
        has_idle_work=has_idle_work,
        remembered_states=remembered_states,
        windows=windows,
        widths={task: 2 if task in WHOLE_TASKS else 1 for task in tasks if task != "generate"},
        whole_tasks=tuple(task for task in tasks if task in WHOLE_TASKS),
        most_embeddings=most_embeddings,
        kept_embeddings=kept_embeddings,
        whole_media=whole_media,
        most_rows=most_rows,
    )


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    prompt_len: int
    told: list[int]
    """The tokens about which logprobs of the prompt are told, if they are asked for."""
    pooling: Pooling | None


def _row(new: NewSeq, tokens: list[int]) -> _Row:
    if isinstance(new.params, Pooling):
        return _Row(tokens, new.prompt_len, told=[], pooling=new.params)
    told = list(new.tokens) if new.params.prompt_logprobs is not None else []
    if told and len(new.tokens) > new.prompt_len:
        raise ValueError("prompt logprobs are asked for again")
    return _Row(tokens, new.prompt_len, told, pooling=None)


class FakeWorker:
    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts
        self.cache = FakeCache(facts)
        self.media, self.sources = FakeMedia(facts), FakeSources(facts.source_layers)
        self.adapters = FakeAdapters()
        self._rows: dict[int, _Row] = {}
        self.states = None if facts.remembered_states is None else FakeStates(facts.remembered_states)
        self.failed = False
        """Whether the last step has failed."""
        self.prepared, self.drafter = 0, reference

    def launch(self, step: StepInput, following: Callable[[], StepBounds] | None = None) -> Landed:
        if self.failed and not step.fresh:
            raise ValueError("a step before it failed")
        self.failed = True
        if sum(seq.tokens for seq in step.seqs) > self.facts.max_num_batched_tokens:
            raise ValueError("the step is larger than the budget")
        if len({seq.slot for seq in step.seqs}) < len(step.seqs):
            raise ValueError("a row occurs twice")
        for new in step.new:
            self._rows[new.slot] = _row(new, self.media.begin(new))
            shift = self.adapters.shifts[new.adapter] if new.adapter else 0
            self.cache.begin(new.slot, shift, new.adapter_from)
            self.sources.begin(new)
        self.sources.follow(step)
        self.cache.copy(step.copies)
        tokens_of = {slot: row.tokens for slot, row in self._rows.items()}
        self.media.follow(step, tokens_of)
        if self.states is not None:
            self.states.follow(step.seqs, tokens_of)
        bounds = bounds_of(step, following)

        def sample(seq: SeqStep) -> int:
            token, bound = self._run(seq), bounds.get((seq.slot, seq.output_index))
            return token if bound is None else nearest(token, allowed_ids(bound))

        tokens, held = run_rows(step, self.facts, tokens_of, write=self.cache.write, sample=sample)
        if self.states is not None:
            self.states.land([seq for seq in step.seqs if seq.guesses], held)
        prompt_logprobs = {
            seq.slot: self._prompt_logprobs(seq) for seq in step.seqs if self._rows[seq.slot].told
        }
        pooled = {seq.slot: self._vectors(seq) for seq in step.seqs if seq.pools}
        failed = {slot: vectors for slot, vectors in pooled.items() if isinstance(vectors, str)}
        given = {slot: vectors for slot, vectors in pooled.items() if isinstance(vectors, Vectors)}
        self.failed = False
        drafts = run_drafter(step, tokens_of, self.cache.has_room, self.drafter)
        return Landed(StepOutput(step.number, tokens, [], prompt_logprobs, failed, given, held, {}, drafts))

    def prepare(self) -> bool:
        self.prepared += 1  # of three things, if facts say that there is something
        return self.prepared < 3

    def lost(self, error: Exception) -> bool:
        return type(error).__name__ == "AcceleratorError"

    def _run(self, seq: SeqStep) -> int:
        if not self.facts.causal:
            return self._run_whole(seq)
        row = self._rows[seq.slot]
        self.cache.check(seq, row.tokens)
        if not seq.samples:
            return -1
        end = seq.start + seq.count
        if row.pooling is not None:
            raise ValueError("a pooled row is to be sampled")
        if seq.output_index != end - row.prompt_len:
            raise ValueError("output_index is wrong")
        if self.facts.windows[0]:
            token = text_after(row.tokens[:end])
        else:
            token = _attend([self.cache.entry(seq.slot, position) for position in range(end)])
        if self.states is not None:
            last = self.cache.entry(seq.slot, end - 1) or 0
            token = (token + self.states.behind[seq.slot, end] - last) % VOCAB
        return (token + self.sources.read(seq.slot)) % VOCAB

    def _run_whole(self, seq: SeqStep) -> int:
        row = self._rows[seq.slot]
        if seq.blocks or seq.samples or not seq.pools or (seq.start, seq.count) != (0, len(row.tokens)):
            raise ValueError("a sequence of an encoder must be computed whole, and without blocks")
        return -1

    def _vectors(self, seq: SeqStep) -> Vectors | str:
        row = self._rows[seq.slot]
        if row.pooling is None or seq.samples or seq.start + seq.count != len(row.tokens):
            raise ValueError("a row is pooled that must not be, or not yet")
        if row.pooling.late_document:
            return QUERY_GONE
        if not self.facts.causal:
            return vectors_of(row.tokens, row.pooling)
        entries = [self.cache.entry(seq.slot, position) for position in range(len(row.tokens))]
        return _pool(entries, row.pooling)

    def _prompt_logprobs(self, seq: SeqStep) -> list[TokenLogprobs]:
        """Logprobs that name the token they are about, so that a test sees each of them once and in order."""
        row = self._rows[seq.slot]
        about = range(seq.start + 1, min(seq.start + seq.count + 1, row.prompt_len))
        return [TokenLogprobs([row.told[position]], [0.0], 1) for position in about]


class FakeExecutor(NoCalls):
    """An executor with a FakeWorker, which misbehaves in a few ways."""

    def __init__(self, config: WorkerConfig, report: Callable[[str, float], None]) -> None:
        self._config = config
        self._report = report
        self._worker = FakeWorker(facts(max_num_seqs=config.options.max_num_seqs or 8))
        self._marks: dict[int, set[int]] = {}
        self._due: deque[tuple[StepInput, DueStep]] = deque()
        self._bounds: deque[StepBounds] = deque()
        self._stopped = False
        self._step_done: socket.socket | None = None
        self._timer_end: socket.socket | None = None

    def start(self) -> WorkerFacts:
        if Path(self._config.folder, "no-weights").exists():
            raise ValueError("model.safetensors: tensor 'lm_head.weight' is missing")
        self._report("weights", 1.0)
        if self._config.model.raw.get("slow"):
            time.sleep(60)
        self._report("cache", 1.0)
        self._report("warmup", 1.0)
        return self._worker.facts

    def call(self, call: WorkerCall) -> CalledBefore:
        return CalledBefore([self._worker.adapters.call(call)])

    def submit(self, step: StepInput) -> Landed:
        if not self._due and not any(seq.bound for seq in step.seqs):
            return self._compute(step)
        due = DueStep()
        self._due.append((step, due))
        self._compute_due()
        return due

    def idle(self, *, wait: bool = False) -> bool:
        return False

    def bind(self, bounds: StepBounds) -> None:
        self._bounds.append(bounds)
        self._compute_due()

    def _compute_due(self) -> None:
        while self._due and (self._bounds or not any(seq.bound for seq in self._due[0][0].seqs)):
            step, due = self._due.popleft()
            due.land(self._compute(step))

    def _compute(self, step: StepInput) -> Landed:
        time.sleep(0.002)  # a forward pass: tests interrupt streams in the middle
        for new in step.new:
            self._marks[new.slot] = {token for token in new.tokens[: new.prompt_len] if token >= BREAKS_STEP}
        marks = {mark for seq in step.seqs for mark in self._marks[seq.slot]}
        if KILLS_PROCESS in marks:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANGS_STEP in marks:
            threading.Event().wait()
        landed = self._worker.launch(step, self._bounds.popleft)
        if LOSES_DEVICE in marks:
            landed.output = ExecutorDead("the device failed")
        elif BREAKS_STEP in marks:
            landed.output = RuntimeError("secret detail of the forward pass")
        elif BREAKS_ROW in marks and isinstance(landed.output, StepOutput):
            rows = [seq.slot for seq in step.seqs if BREAKS_ROW in self._marks[seq.slot]]
            for slot in rows:
                landed.output.failed[slot] = "the model produced non-finite logits"
        if SLOW_STEP in marks and self._timer_end is not None:
            return SlowStep(landed.output, self._timer_end)
        return landed

    def register(self, poller: zmq.Poller) -> None:
        if self._step_done is None:
            self._step_done, self._timer_end = socket.socketpair()
            poller.register(self._step_done, zmq.POLLIN)

    def stop(self) -> None:
        self._stopped = True
        for end in (self._step_done, self._timer_end):
            if end is not None:
                end.close()

    def check(self) -> None:
        if self._stopped:  # as that of ranks says
            raise ExecutorDead("the workers have been stopped")


if __name__ == "__main__":
    sys.exit(engine_main.main(FakeExecutor))
