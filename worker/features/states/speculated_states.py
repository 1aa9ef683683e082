"""States and guesses: a state goes on by the tokens of its sequence, and by those guesses that hold.

In layers with states the row of a sequence computes its guesses, too, which have rows of their own in others.
It writes the state behind the token before them alone, and the inputs of guesses are kept. When tokens have
been sampled, the state goes on by those guesses that hold. The others cost nothing more. Stages before the
last one learn later which hold. They copy these inputs, because other steps are computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from models.context import ForwardContext, StateRows, use_context
from models.layers.state import StateLayer
from models.state_rows import NOWHERE, StateRow, state_columns
from worker.protocol import SeqStep
from worker.steps.batch import Batch
from worker.tables.slots import Slots


def read_later(
    layers: Sequence[StateLayer], batch: Batch, slots: Slots, *, copies: bool
) -> Callable[[], None]:
    """Make a function that lets states go on by those guesses of a step that hold.

    It finds the sampled tokens in the table. `copies`: other steps may be computed before it is called.
    """
    guessing = [seq for seq in batch.asked.seqs if seq.guesses]
    total = sum(len(seq.guesses) for seq in guessing)
    inputs = [[kept[:total] for kept in layer.guesses] for layer in layers]
    if copies:
        inputs = [[kept.clone() for kept in own] for own in inputs]
    return partial(_read_held, layers, inputs, guessing, slots)


def _read_held(
    layers: Sequence[StateLayer],
    inputs: Sequence[Sequence[Tensor]],
    guessing: Sequence[SeqStep],
    slots: Slots,
) -> None:
    """Let states go on by the guesses of these sequences that hold; `inputs` are those of each layer."""
    held = [_count_held(seq, slots) for seq in guessing]
    if not any(held):
        return
    rows = [_held_row(seq, count, slots.count + 1) for seq, count in zip(guessing, held, strict=True)]
    counts = [len(seq.guesses) for seq in guessing]
    total, starts = sum(counts), [0, *accumulate(counts)]
    ends = [seq.start + seq.tokens for seq in guessing]
    nothing = torch.empty(0, dtype=torch.int32)
    context = ForwardContext(
        positions=torch.ones(total, dtype=torch.int64),  # none of them begins its sequence
        query_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=nothing.view(0, 0),
        slot_mapping=nothing.long(),
        block_size=1,
        query_lens_host=counts,
        kv_lens_host=ends,
        states=StateRows(torch.tensor(state_columns(rows), dtype=torch.int32), rows),
    )
    with use_context(context):
        for layer, kept in zip(layers, inputs, strict=True):
            layer.read_states(kept)


def _count_held(seq: SeqStep, slots: Slots) -> int:
    end = seq.start + seq.count
    return seq.count_held(slots.tokens[seq.slot, end : end + len(seq.guesses)].tolist())


def _held_row(seq: SeqStep, held: int, first_remembered: int) -> StateRow:
    """The row of those of a sequence's guesses that hold, behind which states may be remembered."""
    if not held:
        return StateRow(NOWHERE, NOWHERE)
    behind = ((count - seq.count, first_remembered + place) for count, place in seq.kept)
    kept = tuple((count, place) for count, place in behind if 0 < count <= held)
    return StateRow(seq.slot, seq.slot, kept, held - len(seq.guesses))
