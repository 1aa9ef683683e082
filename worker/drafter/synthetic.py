"""Guesses that hold by chance: so a drafter is priced of which only the size is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.steps.batch import Batch
from worker.tables.random_bits import uniform
from worker.tables.slots import Slots


def hold_by_chance(
    rates: Sequence[float], batch: Batch, tokens: Tensor, slots: Slots, vocab_size: int
) -> None:
    """Overwrite the tokens [R] that a step has sampled, also in the table: guesses hold at these rates.

    Each rate is how often all guesses up to its place in a draft hold. A guess that shall not hold gives way
    to another token. Answers that are held to a form keep what was sampled.
    """
    if batch.sampled is None:
        return
    guessing = [seq for seq in batch.asked.seqs if seq.guesses and not seq.bound]
    held_slots = np.array([seq.slot for seq in guessing], np.int64)
    index = np.array([seq.output_index for seq in guessing], np.int64)
    # The number of the slot is added, because requests without a seed may all have the same.
    numbers = iter(
        (uniform(slots.seed[held_slots] + held_slots.astype(np.uint64), index) * 2.0**-31).tolist()
    )
    chosen: list[int] = tokens.tolist()
    row = 0
    for seq in batch.asked.seqs:
        if seq.guesses and not seq.bound:
            number = next(numbers)
            held = sum(number < rate for rate in rates[: len(seq.guesses)])
            chosen[row : row + held] = seq.guesses[:held]
            if held < len(seq.guesses) and chosen[row + held] == seq.guesses[held]:
                chosen[row + held] = (seq.guesses[held] + 1) % vocab_size
        row += seq.samples * (1 + len(seq.guesses))
    tokens.copy_(torch.tensor(chosen))
    slots.tokens.view(-1)[batch.sampled.flat] = tokens
