"""A step in the making: its rows so far, what is left of its budget, how much of it each sequence may have.

The scheduler asks in the order in which it wants sequences to run; here nobody is preferred.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.config import EngineConfig
from engine_core.scheduling.sequence import Sequence
from worker.protocol import NewSeq, Pooling, SeqStep, StepInput, WorkerFacts


@dataclass(slots=True)
class Plan:
    """A step, and the sequence of each of its rows."""

    step: StepInput
    seqs: list[Sequence]


class Draft:
    def __init__(self, config: EngineConfig, facts: WorkerFacts) -> None:
        self.left = facts.max_num_batched_tokens
        """Tokens of the budget."""
        self._facts = facts
        self._longest = config.long_prefill_token_threshold
        self._chunks = config.enable_chunked_prefill and facts.causal
        self._reads = False  # some row takes several tokens
        self._pooled = 0  # hidden states, of this step and of earlier ones, that its pooled sequences need
        self._new: list[NewSeq] = []
        self._rows: list[SeqStep] = []
        self._seqs: list[Sequence] = []

    @property
    def rows(self) -> int:
        return len(self._rows)

    def chunk(self, want: int, *, alone: bool) -> int:
        """How many of the tokens it wants a sequence gets in this step."""
        if self._longest and not alone and self._chunks:
            want = min(want, self._longest)
        return min(want, self.left)

    def may_cut(self, seq: Sequence) -> bool:
        """A text to be pooled is not cut for others that are read: its last digits would depend on them.

        Beside single tokens it may be, or it might wait for ever.
        """
        return self._chunks and not (seq.pools and self._reads)

    def can_pool(self, seq: Sequence, *, ends: bool) -> bool:
        """Cached beginnings cost no budget, but pooling many of them together would take much memory."""
        if not (ends and seq.pools and self._pooled):
            return True
        most = max(self._facts.max_num_batched_tokens, self._facts.max_model_len)
        return self._pooled + self._pooled_rows(seq) <= most

    def bring(self, new: NewSeq) -> None:
        """A sequence enters its row with this step."""
        self._new.append(new)

    def add(self, seq: Sequence, count: int, new_blocks: list[int]) -> None:
        """The next `count` tokens of a sequence are computed: it goes on from behind them."""
        if seq.slot is None:
            raise RuntimeError(f"sequence {seq.key} was planned without a row")
        known = len(seq.tokens) + seq.pending
        start, ends = seq.computed, seq.computed + count == known
        samples, pools = ends and not seq.pools, ends and seq.pools
        self._rows.append(SeqStep(seq.slot, start, count, new_blocks, samples, known - seq.prompt_len, pools))
        self._seqs.append(seq)
        self.left -= count
        self._reads |= count > 1
        self._pooled += self._pooled_rows(seq) if pools else 0
        seq.computed += count
        seq.pending += samples
        seq.inflight += 1

    def plan(self, number: int) -> Plan | None:
        """None if it has no rows."""
        return Plan(StepInput(number, self._new, self._rows), self._seqs) if self._rows else None

    def _pooled_rows(self, seq: Sequence) -> int:
        params = seq.request.params
        return seq.prompt_len if isinstance(params, Pooling) and params.task in self._facts.whole_tasks else 1
