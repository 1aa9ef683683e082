"""A step while it is planned: its rows so far, what is left of its budgets, and the share of each sequence.

A row says which positions of a sequence are computed: all that it knows and has not computed, or as many as
fit. There are two budgets: new tokens, which are a hard bound, and expected time, while somebody reads a
stream. Each row is priced by the line of `step_time_model.py`, and takes its price from what is left.

The scheduler asks for sequences in the order in which it wants them to run; there is no preference here. A
sequence that features hold back, up to `Sequence.free_from`, gets what they allow. When all rows are there,
features complete what the step tells the worker.

A `PlannedStep` is what remains: the input of the worker, and what the engine has to know when it lands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.scheduling.sequence import Place, Sequence
from engine_core.scheduling.step_time_model import ENCODED, READ, ROW, TOKEN, StepTime, Work
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput
from worker.worker_facts import WorkerFacts


@dataclass(slots=True)
class PlannedStep:
    """The input of a step, the sequence of each of its rows, and what it is expected to cost."""

    step: StepInput
    seqs: list[Sequence]
    costs: list[float]
    """The expected seconds of each row, without a share of the step itself."""
    work: Work
    fills: bool
    """Whether its time was bounded, and most of what it may take was planned."""
    binds: bool
    """Whether `StepBounds` have to follow it."""
    step_cost: float
    """The expected seconds of the step itself, whatever its rows."""
    expected: float
    tokens: int
    prompts: int
    """The rows that read a prompt, or a chunk of one, to generate from it."""
    texts: int
    is_decoding: bool
    """Whether rows compute tokens of answers alone, each of which samples the next one."""
    dropped: set[int] = field(default_factory=set[int])
    """The slots of rows that have landed and whose outcome nobody wants, or that have failed."""


class StepHooks(Protocol):
    """The hooks of features (`feature.py`) that are called while a step is built."""

    begin_step: tuple[Callable[[], None], ...]
    least: tuple[Callable[[Sequence, int], int], ...]
    reach: tuple[Callable[[Sequence, int, int, StepBuilder], int], ...]
    admit: tuple[Callable[[Sequence, NewSeq, StepBuilder], NewSeq], ...]
    add_row: tuple[Callable[[Sequence, int, StepBuilder], float], ...]
    finish: tuple[Callable[[StepBuilder], None], ...]


class StepBuilder:
    """Collects the rows of one step under its budgets."""

    def __init__(
        self,
        config: EngineConfig,
        facts: WorkerFacts,
        step_time: StepTime,
        hooks: StepHooks,
        may_split: bool,
    ) -> None:
        """`may_split`: whether only a chunk of a prompt may be computed."""
        for begin_step in hooks.begin_step:
            begin_step()
        self._hooks = hooks
        self.budget = facts.max_num_batched_tokens
        self.left = inf
        """The expected seconds that can still be added."""
        self.spare = 0.0
        """The expected seconds beyond `left` that may be added if they complete a prompt."""
        self._step_cost = self.cost = step_time.step
        """The expected seconds of the step so far."""
        self._facts = facts
        self._step_time = step_time
        self._longest = config.long_prefill_token_threshold
        self.may_split = may_split
        self.has_prefill = False
        """Whether a row computes several tokens."""
        self.binds = False
        """Whether `StepBounds` have to follow the step."""
        self._reading = self._texts = 0  # rows that read a prompt; those whose prompt is to be pooled
        self.pooled = 0
        """The hidden states that are read where texts end."""
        self._work: Work = [1.0, 0.0, 0.0, 0.0, 0.0]
        self.new: list[NewSeq] = []
        """The sequences that enter their slots with this step."""
        self.rows: list[SeqStep] = []
        self.seqs: list[Sequence] = []
        """The sequence of each row."""
        self.told: dict[str, Any] = {}
        """What the step tells the worker beside its rows: fields of `StepInput`."""
        self._costs: list[float] = []

    @property
    def full(self) -> bool:
        return not self.budget or self.left <= 0

    def completes(self, seq: Sequence) -> bool:
        """Whether what is left of the step has room for all that a sequence has to compute."""
        count = seq.unread
        if count > self.budget or self.left == inf:
            return count <= self.budget
        known = len(seq.tokens) + seq.pending
        return count <= self._step_time.fitting(max(self.left, 0.0) + self.spare, known - count)

    def set_half_aside(self) -> tuple[int, float]:
        """Set half of what is left of both budgets aside, for `return_half`."""
        half = self.budget // 2, self.left / 2
        self.budget -= half[0]
        self.left = half[1]
        return half

    def return_half(self, half: tuple[int, float]) -> None:
        self.budget += half[0]
        self.left += half[1]

    def chunk(self, seq: Sequence, gap: int, start: int, *, alone: bool) -> int:
        """The number of its `gap` uncomputed tokens, from position `start` on, that a sequence gets; 0: none.

        `alone`: no other sequence runs. The first prompt of a step gets one token at least, or it might
        starve; if prompts are computed whole, or what a feature keeps together, it gets all.
        """
        is_free, least = start >= seq.free_from, 1
        if not is_free:
            for least_of in self._hooks.least:
                least = max(least, least_of(seq, start))
        if self._longest and not alone and self.may_split:
            gap = min(gap, max(self._longest, least))
        gap = min(gap, self.budget)
        if self.left < inf:
            gap = self._in_time(gap, start, least)
        if not is_free or seq.place is not Place.RUNNING:
            for reach in self._hooks.reach:
                gap = reach(seq, start, gap, self)
        return gap

    @property
    def fitting(self) -> float:
        """The embeddings that can be computed in the time that is left; the first row waits for all."""
        return self._step_time.encoded(max(self.left, 0.0)) if self.rows else inf

    def _in_time(self, gap: int, start: int, least: int) -> int:
        """How many of `gap` tokens fit into the time that is left; the first prompt gets `least` anyway."""
        left = max(self.left, 0.0)
        fitting = self._step_time.fitting(left, start)
        if fitting < gap <= self._step_time.fitting(left + self.spare, start):
            return gap
        if self.may_split:
            return min(gap, fitting if self.has_prefill else max(least, fitting))
        return gap if gap <= fitting or not self.has_prefill else 0

    def can_pool(self, seq: Sequence, *, ends: bool) -> bool:
        """Whether this sequence, if it ends in this step, can be pooled beside those that are `pooled` in it.

        Cached prefixes take nothing of the budget, but pooling many of them in one step takes much memory.
        """
        if not (ends and seq.pools and self.pooled):
            return True
        most = max(self._facts.max_num_batched_tokens, self._facts.max_model_len)
        return self.pooled + self._pooled_rows(seq) <= most

    def add(self, seq: Sequence, count: int, new_blocks: list[int]) -> float:
        """Add a row that computes the next `count` tokens of a sequence; returns the seconds it will take."""
        known = len(seq.tokens) + seq.pending
        start, ends, prompt_len = seq.computed, seq.computed + count == known, seq.prompt_len
        is_text, work, step_time = seq.pools, self._work, self._step_time
        samples, pools = ends and not is_text, ends and is_text
        self.rows.append(SeqStep(seq.slot, start, count, new_blocks, samples, known - prompt_len, pools))
        self.seqs.append(seq)
        reads = count * start + count * (count + 1) // 2 if self._facts.causal else count * count
        cost = step_time.token * count + step_time.read * reads
        work[TOKEN] += count
        work[READ] += reads
        if start < seq.free_from:
            for add_row in self._hooks.add_row:
                cost += add_row(seq, count, self)
        if samples:
            cost += step_time.sample
            work[ROW] += 1
        elif pools:
            self.pooled += self._pooled_rows(seq)
        self._costs.append(cost)
        self.cost += cost
        self.left -= cost
        self.budget -= count
        self.has_prefill |= count > 1
        self._reading += start < prompt_len
        self._texts += is_text
        seq.computed += count
        seq.pending += samples
        seq.in_flight += 1
        return cost

    def enter(self, seq: Sequence, slot: int, *, again: bool) -> None:
        """Have a sequence enter its slot in the worker, perhaps `again` after it was preempted."""
        params = seq.request.params
        if again and isinstance(params, Sampling) and not seq.owes_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)  # they were sent before
        new = NewSeq(slot, list(seq.tokens), seq.prompt_len, params)
        for admit in self._hooks.admit:
            new = admit(seq, new, self)
        self.new.append(new)

    def copy(self, blocks: list[int], copies: list[int]) -> None:
        """Have the worker copy blocks of the cache, of which the first rows begin a sequence that enters."""
        self.told.setdefault("copies", []).extend(zip(blocks, copies, strict=True))

    @property
    def decoding(self) -> list[Sequence]:
        """The sequences of its rows, if each row computes a single token of an answer; else none."""
        rows = len(self.rows)
        alike = not self.new and not self._reading and self._work[ROW] == self._work[TOKEN] == rows
        return self.seqs if alike else []

    @property
    def room(self) -> int:
        """The number of single tokens that fit under both budgets."""
        return int(min(self.budget, max(self.left, 0.0) / self._step_time.row))

    def extend(self, at: int, count: int, gained: int, **changes: object) -> None:
        """Let row `at` compute so many tokens more, each of which samples, too, and change what it tells.

        Its sequence has `gained` so many blocks in each group for them.
        """
        row, seq = self.rows[at], self.seqs[at]
        blocks = row.blocks
        if gained:
            told = gained + len(blocks) // len(seq.tables)
            blocks = [block for table in seq.tables for block in table[-told:]]
        self.rows[at] = replace(row, blocks=blocks, **changes)
        reads = count * (row.start + 1) + count * (count + 1) // 2
        cost = self._step_time.tokens(count, reads) + self._step_time.sample * count
        for term, amount in ((TOKEN, count), (READ, reads), (ROW, count)):
            self._work[term] += amount
        self._costs[at] += cost
        self.cost += cost
        self.left -= cost
        self.budget -= count

    def change_row(self, at: int, **changes: object) -> None:
        """Change what row `at` tells the worker."""
        self.rows[at] = replace(self.rows[at], **changes)

    def finish(self, number: int) -> PlannedStep | None:
        """The step under its number, or None if it has no rows."""
        if not self.rows:
            return None
        for finish in self._hooks.finish:
            finish(self)
        step, work = StepInput(number, self.new, self.rows, **self.told), self._work
        fills = self.left < self.cost
        return PlannedStep(
            *(step, self.seqs, self._costs, work, fills, self.binds, self._step_cost, self.cost),
            tokens=int(work[TOKEN]),
            prompts=self._reading - self._texts,
            texts=self._texts,
            is_decoding=work[ROW] == work[TOKEN] and not (self.new or self._reading or work[ENCODED]),
        )

    def encode_for_row(self, embeddings: float) -> float:
        """Add embeddings that the row reads which is being added; returns their seconds."""
        self._work[ENCODED] += embeddings
        return self._step_time.encoding(embeddings)

    def encode(self, embeddings: float) -> None:
        """Add embeddings that no row of the step reads yet."""
        cost = self.encode_for_row(embeddings)
        self.cost += cost
        self.left -= cost

    def _pooled_rows(self, seq: Sequence) -> int:
        """The number of hidden states that are read when this sequence is pooled."""
        params = seq.request.params
        if not isinstance(params, Pooling):
            return 1
        is_whole = params.outputs or params.spans or params.task in (*self._facts.whole_tasks, "align")
        return seq.prompt_len if is_whole else 1
