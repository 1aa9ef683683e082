"""A step while it is planned: its rows so far, the tokens left in its budget, and the share of each sequence.

The scheduler asks for sequences in the order in which it wants them to run; there is no preference here.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.config import EngineConfig
from engine_core.scheduling.sequence import Sequence
from worker.protocol import NewSeq, Pooling, SeqStep, StepInput, WorkerFacts


@dataclass(slots=True)
class PlannedStep:
    """The input of a step, and the sequence of each of its rows."""

    step: StepInput
    seqs: list[Sequence]


class StepBuilder:
    """Collects the rows of one step under its token budget."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts) -> None:
        self.budget = facts.max_num_batched_tokens
        """The tokens that can still be added."""
        self._facts = facts
        self._longest = config.long_prefill_token_threshold
        self._chunks = config.enable_chunked_prefill and facts.causal
        self._has_prefill = False  # a row has several tokens
        self._pooled = 0  # hidden states that its pooled rows read, of this step and of earlier ones
        self._new: list[NewSeq] = []
        self._rows: list[SeqStep] = []
        self._seqs: list[Sequence] = []

    @property
    def rows(self) -> int:
        return len(self._rows)

    def chunk(self, gap: int, *, alone: bool) -> int:
        """The number of its uncomputed tokens that a sequence gets; `alone` if no other one runs."""
        if self._longest and not alone and self._chunks:
            gap = min(gap, self._longest)
        return min(gap, self.budget)

    def may_split(self, seq: Sequence) -> bool:
        """Whether only a chunk of this prompt may be computed.

        A pooled prompt is not split to share a step with other prompts, or its result would depend on them.
        Beside decoding rows it may be, or it could starve.
        """
        return self._chunks and not (seq.pools and self._has_prefill)

    def can_pool(self, seq: Sequence, *, ends: bool) -> bool:
        """Whether this sequence, if it ends in this step, can be pooled beside those that are in it already.

        Cached prefixes take nothing of the budget, but pooling many of them in one step takes much memory.
        """
        if not (ends and seq.pools and self._pooled):
            return True
        most = max(self._facts.max_num_batched_tokens, self._facts.max_model_len)
        return self._pooled + self._pooled_rows(seq) <= most

    def add_new(self, new: NewSeq) -> None:
        """Let a sequence enter its slot with this step."""
        self._new.append(new)

    def add(self, seq: Sequence, count: int, new_blocks: list[int]) -> None:
        """Add a row that computes the next `count` tokens of a sequence."""
        if seq.slot is None:
            raise RuntimeError(f"sequence {seq.key} was planned without a slot")
        known = len(seq.tokens) + seq.pending
        start, ends = seq.computed, seq.computed + count == known
        samples, pools = ends and not seq.pools, ends and seq.pools
        self._rows.append(SeqStep(seq.slot, start, count, new_blocks, samples, known - seq.prompt_len, pools))
        self._seqs.append(seq)
        self.budget -= count
        self._has_prefill |= count > 1
        self._pooled += self._pooled_rows(seq) if pools else 0
        seq.computed += count
        seq.pending += samples
        seq.in_flight += 1

    def finish(self, number: int) -> PlannedStep | None:
        """The step under its number, or None if it has no rows."""
        if not self._rows:
            return None
        return PlannedStep(StepInput(number, self._new, self._rows), self._seqs)

    def _pooled_rows(self, seq: Sequence) -> int:
        """The number of hidden states that are read when this sequence is pooled."""
        params = seq.request.params
        return seq.prompt_len if isinstance(params, Pooling) and params.task in self._facts.whole_tasks else 1
