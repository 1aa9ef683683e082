"""Where the tokens of a step lie: from its rows to what a model reads of them.

`lay_out` does it by torch, on any device. Of a small step its dozen operations cost more than all that they
compute, so the CPU has its own (`worker/kernels/cpu/positions.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor

from models.context import ForwardContext
from worker.protocol import SeqStep
from worker.tables.slots import Slots
from worker.tables.staging import Packet


@dataclass(frozen=True, slots=True)
class Columns:
    """StepInput.seqs, turned by 90 degrees."""

    slots: list[int]  # [B]
    starts: list[int]  # [B]
    counts: list[int]  # [B]
    ends: list[int]  # [B] tokens of each sequence once the step is done
    query_starts: list[int]  # [B + 1]

    @classmethod
    def of(cls, seqs: list[SeqStep]) -> Columns:
        counts = [seq.count for seq in seqs]
        return cls(
            slots=[seq.slot for seq in seqs],
            starts=[seq.start for seq in seqs],
            counts=counts,
            ends=[seq.start + seq.count for seq in seqs],
            query_starts=[0, *accumulate(counts)],
        )


Laid = tuple[Tensor, ForwardContext]
"""The ids of a step's tokens [T] int64, and where they are."""

LayOut = Callable[[Columns, Slots, Packet], Callable[[], Laid]]
"""To be called while the packet is filled; what it gives, once that is sent and the tables are up to date."""


def lay_out(columns: Columns, slots: Slots, packet: Packet) -> Callable[[], Laid]:
    counts, query_starts = np.array(columns.counts), np.array(columns.query_starts)
    rows = np.repeat(np.arange(len(counts)), counts)  # [T]
    places = np.arange(len(rows)) + (np.array(columns.starts) - query_starts[:-1])[rows]  # [T]
    row_slots, row_of = packet.ints(columns.slots), packet.ints(rows)
    staged = packet.ints(places), packet.ints(query_starts), packet.ints(columns.ends)

    def finish() -> Laid:
        positions, query_starts, kv_lens = staged
        positions = positions.long()  # [T]
        width = blocks_of(columns, slots)
        block_table = slots.block_table[:, :width].index_select(0, row_slots)  # [B, width]
        slot_mapping = positions  # without a cache nothing reads it
        if slots.paged:
            blocks = block_table[row_of, positions // slots.block_size].long()  # [T]
            slot_mapping = blocks * slots.block_size + positions % slots.block_size
        ids = slots.tokens[row_slots[row_of], positions].long()
        return ids, ForwardContext(
            positions=positions,
            query_starts=query_starts,
            kv_lens=kv_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            block_size=slots.block_size,
            query_lens_host=columns.counts,
            kv_lens_host=columns.ends,
        )

    return finish


def blocks_of(columns: Columns, slots: Slots) -> int:
    """Of the longest sequence."""
    return -(-max(columns.ends) // slots.block_size) if slots.paged else 0
