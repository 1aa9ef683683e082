"""The bounds that follow a step: for each of its bound rows, what the matcher of its sequence allows.

A matcher must have taken every token before the one that it bounds. So the bounds of a step are made when
none of its bound rows waits for the sample of an earlier step, and that step's forward runs meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.grammar.matcher import GrammarError
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_builder import PlannedStep
from worker.protocol import Bound, StepBounds


@dataclass(slots=True)
class MadeBounds:
    bounds: StepBounds
    refused: list[tuple[Sequence, str]] = field(default_factory=list)
    """The sequences whose matchers cannot go on, and why. Their rows are not bounded: they end."""


def make_bounds(planned: PlannedStep) -> MadeBounds | None:
    """The bounds of a step; None if a row waits for an earlier sample.

    Rows whose outcome nobody wants any more may sample anything.
    """
    number = planned.step.number
    rows: dict[int, Bound | None] = {}
    wanted: list[tuple[int, Sequence]] = []
    for seq, row in zip(planned.seqs, planned.step.seqs, strict=True):
        if row.bound:
            rows[row.slot] = None
            if seq.wants(number):
                if len(seq.tokens) - seq.prompt_len < row.output_index:
                    return None
                wanted.append((row.slot, seq))
    made = MadeBounds(StepBounds(number, rows))
    for slot, seq in wanted:
        try:
            rows[slot] = seq.matcher.bound() if seq.matcher is not None else None
        except GrammarError as error:
            made.refused.append((seq, str(error)))
    return made
