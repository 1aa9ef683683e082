"""A step while it is planned: its rows so far, what is left of its budgets, and the share of each sequence.

There are two budgets: new tokens, which are a hard bound, and expected time, while somebody reads a stream.
The scheduler asks for sequences in the order in which it wants them to run; there is no preference here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.scheduling.cache.states import StepStates
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_time import ENCODED, READ, ROW, TOKEN, StepTime, Work
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
    prompts: int
    """The rows that read a prompt, or a chunk of one, to generate from it."""
    texts: int
    guessed: int = 0
    """The tokens that are guesses."""
    counted: dict[int, int] = field(default_factory=dict[int, int])
    """slot -> how many of the sampled tokens may count, where guesses have bounds: those that follow them."""

    @property
    def tokens(self) -> int:
        return int(self.work[TOKEN])

    @property
    def is_decoding(self) -> bool:
        """Whether each row computes a single token of an answer, with guesses behind it or without."""
        others = self.step.new or self.prompts or self.texts or self.work[ENCODED]
        return not others and self.work[ROW] == self.tokens == len(self.seqs) + self.guessed


class StepHooks(Protocol):
    """The hooks of features (`feature.py`) that are called while a step is built."""

    begin_step: tuple[Callable[[], None], ...]
    least: tuple[Callable[[Sequence, int], int], ...]
    reach: tuple[Callable[[Sequence, int, int, StepBuilder], int], ...]
    admit: tuple[Callable[[Sequence, NewSeq, StepBuilder], NewSeq], ...]
    add_row: tuple[Callable[[Sequence, int, StepBuilder], float], ...]
    finish: tuple[Callable[[StepInput], StepInput], ...]


class StepBuilder:
    """Collects the rows of one step under its budgets."""

    def __init__(
        self, config: EngineConfig, facts: WorkerFacts, step_time: StepTime, hooks: StepHooks
    ) -> None:
        for begin_step in hooks.begin_step:
            begin_step()
        self._hooks = hooks
        self.budget = facts.max_num_batched_tokens
        self.left = inf
        """The expected seconds that can still be added."""
        self._step_cost = self.cost = step_time.step
        """The expected seconds of the step so far."""
        self._facts = facts
        self._step_time = step_time
        self._longest = config.long_prefill_token_threshold
        self.may_split = config.enable_chunked_prefill and facts.cuts_prompts
        """Whether only a chunk of a prompt may be computed."""
        self._has_prefill = False  # a row has several tokens
        self._binds = False
        self._guessed = 0
        self._reading = self._texts = 0  # rows that read a prompt; those whose prompt is to be pooled
        self._pooled = 0
        """The hidden states that are read where texts end."""
        self._work: Work = [1.0, 0.0, 0.0, 0.0, 0.0]
        self.new: list[NewSeq] = []
        """The sequences that enter their slots with this step."""
        self._rows: list[SeqStep] = []
        self._seqs: list[Sequence] = []
        self._costs: list[float] = []

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        return not self.budget or self.left <= 0

    def chunk(self, seq: Sequence, gap: int, start: int, *, alone: bool) -> int:
        """The number of its `gap` uncomputed tokens, from position `start` on, that a sequence gets; 0: none.

        `alone`: no other sequence runs. The first prompt of a step gets one token at least, or it might
        starve; if prompts, or media items, are computed whole, it gets all.
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
        if not is_free or seq.slot is None:
            for reach in self._hooks.reach:
                gap = reach(seq, start, gap, self)
        return gap

    @property
    def fitting(self) -> float:
        """The embeddings that can be computed in the time that is left; the first row waits for all."""
        return self._step_time.encoded(max(self.left, 0.0)) if self._rows else inf

    def _in_time(self, gap: int, start: int, least: int) -> int:
        """How many of `gap` tokens fit into the time that is left; the first prompt gets `least` anyway."""
        fitting = self._step_time.fitting(max(self.left, 0.0), start)
        if self.may_split:
            return min(gap, fitting if self._has_prefill else max(least, fitting))
        return gap if gap <= fitting or not self._has_prefill else 0

    def can_pool(self, seq: Sequence, *, ends: bool) -> bool:
        """Whether this sequence, if it ends in this step, can be pooled beside those that are in it already.

        Cached prefixes take nothing of the budget, but pooling many of them in one step takes much memory.
        """
        if not (ends and seq.pools and self._pooled):
            return True
        most = max(self._facts.max_num_batched_tokens, self._facts.max_model_len)
        return self._pooled + self._pooled_rows(seq) <= most

    def add(self, seq: Sequence, count: int, new_blocks: list[int], states: StepStates) -> float:
        """Add a row that computes the next `count` tokens of a sequence; returns the seconds it will take."""
        if seq.slot is None:
            raise RuntimeError(f"sequence {seq.key} was planned without a slot")
        known = len(seq.tokens) + seq.pending
        start, ends = seq.computed, seq.computed + count == known
        is_text = seq.pools
        samples, pools = ends and not is_text, ends and is_text
        bound = samples and seq.matcher is not None and seq.matcher.binds
        self._binds |= bound
        output_index = known - seq.prompt_len
        self._rows.append(
            SeqStep(seq.slot, start, count, new_blocks, samples, output_index, pools, bound, *states)
        )
        self._seqs.append(seq)
        cost = self._count(seq, count, start, ends=ends)
        self.budget -= count
        self._has_prefill |= count > 1
        self._reading += start < seq.prompt_len
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

    @property
    def decoding(self) -> list[Sequence]:
        """The sequences of its rows, if each row computes a single token of an answer; else none."""
        rows = len(self._rows)
        alike = not self.new and not self._reading and self._work[ROW] == self._work[TOKEN] == rows
        return self._seqs if alike else []

    @property
    def room_for_guesses(self) -> int:
        """The number of guesses that fit under both budgets."""
        return int(min(self.budget, max(self.left, 0.0) / self._step_time.row))

    def guess(self, at: int, guesses: list[int], gained: int) -> None:
        """Add guesses to row `at`, for which its sequence has gained so many blocks in each group."""
        row, seq, count = self._rows[at], self._seqs[at], len(guesses)
        blocks = row.blocks
        if gained:
            told = gained + len(blocks) // len(seq.tables)
            blocks = [block for table in seq.tables for block in table[-told:]]
        bound = row.bound or (count > 0 and seq.matcher is not None)  # thinking may end within the guesses
        self._binds |= bound
        self._rows[at] = replace(row, blocks=blocks, guesses=guesses, bound=bound)
        reads = count * (row.start + 1) + count * (count + 1) // 2
        cost = self._step_time.tokens(count, reads) + self._step_time.rows(count)
        for term, amount in ((TOKEN, count), (READ, reads), (ROW, count)):
            self._work[term] += amount
        self._costs[at] += cost
        self.cost += cost
        self.left -= cost
        self.budget -= count
        self._guessed += count

    def change_row(self, at: int, **changes: object) -> None:
        """Change what row `at` tells the worker."""
        self._rows[at] = replace(self._rows[at], **changes)

    def row(self, at: int) -> SeqStep:
        return self._rows[at]

    def finish(self, number: int) -> PlannedStep | None:
        """The step under its number, or None if it has no rows."""
        if not self._rows:
            return None
        step = StepInput(number, self.new, self._rows)
        for finish in self._hooks.finish:
            step = finish(step)
        fills = self.left < self.cost
        return PlannedStep(
            *(step, self._seqs, self._costs, self._work, fills, self._binds, self._step_cost, self.cost),
            prompts=self._reading - self._texts,
            texts=self._texts,
            guessed=self._guessed,
            counted={},
        )

    def _count(self, seq: Sequence, count: int, start: int, *, ends: bool) -> float:
        """Add what a row computes to the step's work; returns the seconds of that."""
        work, step_time = self._work, self._step_time
        reads = count * start + count * (count + 1) // 2 if self._facts.causal else count * count
        cost = step_time.tokens(count, reads)
        work[TOKEN] += count
        work[READ] += reads
        if start < seq.free_from:
            for add_row in self._hooks.add_row:
                cost += add_row(seq, count, self)
        if ends:
            if seq.pools:
                self._pooled += self._pooled_rows(seq)
            else:
                cost += step_time.rows(1)
                work[ROW] += 1
        self._costs.append(cost)
        self.cost += cost
        self.left -= cost
        return cost

    def encode_for_row(self, embeddings: float) -> float:
        """Add embeddings that the row reads which is being added; returns their seconds."""
        self._work[ENCODED] += embeddings
        return self._step_time.encoding(embeddings)

    def encode(self, embeddings: float) -> None:
        """Add embeddings, of sources or of layers of a tower, that no row of the step reads yet."""
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
