"""Guesses: each becomes a row of its own in the step, and the sampled tokens say which of them hold.

Each of these rows samples as if the tokens before it had been sampled one by one, so a guess holds if it is
the token that the row before it samples. Then the result has the same bits as without guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from models.state_rows import NOWHERE, StateRow
from worker.protocol import SeqStep, StepInput, TokenLogprobs


def give_rows(step: StepInput) -> StepInput:
    """The same step with a row for each guess, behind the row of its sequence."""
    if not [seq for seq in step.seqs if seq.guesses]:
        return step
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


def state_rows(seqs: Sequence[SeqStep], first_remembered: int) -> list[StateRow]:
    """The places of states of each row that `give_rows` makes: those of slots, and remembered ones.

    A sequence with guesses writes the state behind the token before them, from which those that hold go on.
    """
    rows: list[StateRow] = []
    for seq in seqs:
        source = seq.slot if seq.source < 0 else first_remembered + seq.source
        kept = tuple((count, first_remembered + place) for count, place in seq.kept if count <= seq.count)
        if seq.guesses:
            rows.append(StateRow(source, NOWHERE, (*kept, (seq.count, seq.slot)), len(seq.guesses)))
            rows += [StateRow(NOWHERE, NOWHERE)] * len(seq.guesses)
        else:
            rows.append(StateRow(source, seq.slot, kept))
    return rows


def may_guess(seq: SeqStep) -> bool:
    """Whether a row may have guesses: it must sample."""
    return seq.samples and not seq.pools


def count_held(guesses: Sequence[int], sampled: Sequence[int]) -> int:
    """How many guesses hold, where `sampled` are the tokens that were drawn in their places."""
    held = 0
    for guess, token in zip(guesses, sampled, strict=False):
        if guess != token:
            break
        held += 1
    return held


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sequences of a step have sampled; see `StepOutput`."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    held: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    held_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])


def find_held(
    seqs: Sequence[SeqStep], tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> Sampled:
    """What holds of the guesses of `seqs`. `tokens` and `logprobs` have an entry for each row of the step.

    A row that could not sample has -1, which is no guess: it counts only if all guesses before it hold.
    """
    found = Sampled([], [])
    row = 0
    for seq in seqs:
        last = row + (count_held(seq.guesses, tokens[row : row + len(seq.guesses)]) if seq.guesses else 0)
        found.tokens.append(tokens[last])
        if last > row:
            found.held[seq.slot] = seq.guesses[: last - row]
        if logprobs:
            found.logprobs.append(logprobs[last])
            if entries := [entry for entry in logprobs[row:last] if entry is not None]:
                found.held_logprobs[seq.slot] = entries
        row += 1 + len(seq.guesses)
    return found
