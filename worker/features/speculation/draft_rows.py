"""Guesses: each becomes a row of its own in the step, and the sampled tokens say which of them hold.

Each of these rows samples as if the tokens before it had been sampled one by one, so a guess holds if it is
the token that the row before it samples. Then the result has the same bits as without guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace
from torch import Tensor

from worker.capacity import WorkerLimits
from worker.protocol import SeqStep, StepInput, StepOutput, TokenLogprobs
from worker.steps.feature import AddedRows, Feature
from worker.tables.slots import Slots
from worker.worker_facts import WorkerFacts


def give_rows(step: StepInput) -> StepInput:
    """The same step with a row for each guess, behind the row of its sequence."""
    rows: list[SeqStep] = []
    for seq in step.seqs:
        rows.append(replace(seq, guesses=[]) if seq.guesses else seq)
        rows += [
            SeqStep(
                *(seq.slot, seq.start + seq.count + at, 1, [], True, seq.output_index + 1 + at),
                bound=seq.bound,
            )
            for at in range(len(seq.guesses))
        ]
    return replace(step, seqs=rows)


def find_held(seqs: Sequence[SeqStep], output: StepOutput) -> StepOutput:
    """Tell which guesses of `seqs` hold, in an output with a token for each row of the step.

    A row that could not sample has -1, which is no guess: it counts only if all guesses before it hold.
    """
    tokens, logprobs = list[int](), list[TokenLogprobs | None]()
    held, held_logprobs = dict[int, list[int]](), dict[int, list[TokenLogprobs]]()
    row = 0
    for seq in seqs:
        last = row + (seq.count_held(output.tokens[row : row + len(seq.guesses)]) if seq.guesses else 0)
        tokens.append(output.tokens[last])
        if last > row:
            held[seq.slot] = seq.guesses[: last - row]
        if output.logprobs:
            logprobs.append(output.logprobs[last])
            if entries := [entry for entry in output.logprobs[row:last] if entry is not None]:
                held_logprobs[seq.slot] = entries
        row += 1 + len(seq.guesses)
    return replace(output, tokens=tokens, logprobs=logprobs, held=held, held_logprobs=held_logprobs)


class Speculation(Feature):
    _slots: Slots
    _most = 0
    """How many guesses a step may have."""

    def __init__(self, *, takes_some: bool, drafts: int, samples: bool) -> None:
        """`drafts`: the most guesses of a drafter for a sequence; 0: there is none."""
        self._takes_some, self._drafts, self._samples = takes_some, drafts, samples

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        self._slots, self._most = slots, limits.most_rows if self._takes_some else 0
        return ()

    def add_facts(self, facts: WorkerFacts) -> WorkerFacts:
        return replace(facts, most_rows=self._most if self._samples else 0, drafts=self._drafts)

    def add_rows(self, step: StepInput) -> AddedRows | None:
        """Give each guess a row. Raises ValueError if a row cannot have guesses, or if there are too many."""
        count = 0
        for seq in step.seqs:
            if seq.guesses or seq.proposes:
                if not (self._slots.paged and self._most and seq.samples and not seq.pools):
                    raise ValueError(f"step {step.number}: nothing can be guessed behind {seq}")
                count += len(seq.guesses)
        if count > self._most:
            raise ValueError(f"step {step.number} has {count} guesses, of {self._most} at most")
        if not count:
            return None
        texts = [(seq.slot, seq.start + seq.count, seq.guesses) for seq in step.seqs if seq.guesses]
        return AddedRows(give_rows(step), texts, partial(find_held, step.seqs))
