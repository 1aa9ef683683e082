"""The positions of a step's tokens, and the context in which a model reads them.

`lay_out` computes them by torch, on any device. In a small step its dozen operations cost more than all that
they compute, so the CPU has its own (`worker/kernels/cpu/recording.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from torch import Tensor

from models.context import AdapterRows, ForwardContext, StateRows
from models.state_rows import StateRow, state_columns
from worker.protocol import SeqStep
from worker.tables.adapter_rows import Run, numbers_of
from worker.tables.slots import Slots
from worker.tables.staging import Packet


@dataclass(slots=True)
class Columns:
    """What layouts read of a step: the fields of StepInput.seqs as lists, and what features add to them."""

    slots: list[int]  # [B]
    starts: list[int]  # [B]
    counts: list[int]  # [B]
    ends: list[int]  # [B] tokens of each sequence once the step is done
    query_starts: list[int]  # [B + 1]
    states: list[StateRow] = field(default_factory=list[StateRow])  # [B]; nothing if no layer has states
    adapters: list[Run] = field(default_factory=list[Run])  # nothing if no token has one
    types: list[int] | None = None  # [T]: 1 in the second text of a pair, else 0; None: all are 0

    @classmethod
    def of(cls, seqs: Sequence[SeqStep]) -> Columns:
        counts = [seq.count for seq in seqs]
        return cls(
            slots=[seq.slot for seq in seqs],
            starts=[seq.start for seq in seqs],
            counts=counts,
            ends=[seq.start + seq.count for seq in seqs],
            query_starts=[0, *accumulate(counts)],
        )


StepTokens = tuple[Tensor, ForwardContext]
"""The ids of a step's tokens [T] int64, and the context with their positions."""

LayOut = Callable[[Columns, Slots, Packet], Callable[[], StepTokens]]
"""The type of `lay_out`. It is called while the packet is filled, and the function that it returns once the
packet is sent and the tables are up to date."""


def lay_out(columns: Columns, slots: Slots, packet: Packet) -> Callable[[], StepTokens]:
    counts, query_starts = np.array(columns.counts), np.array(columns.query_starts)
    rows = np.repeat(np.arange(len(counts)), counts)  # [T]
    token_positions = np.arange(len(rows)) + (np.array(columns.starts) - query_starts[:-1])[rows]  # [T]
    row_slots, row_of = packet.ints(columns.slots), packet.ints(rows)
    runs = columns.adapters
    adapters = packet.ints(np.array(numbers_of(runs, len(rows)))) if runs else None
    types = None if columns.types is None else packet.ints(columns.types)
    staged = packet.ints(token_positions), packet.ints(query_starts), packet.ints(columns.ends)
    state_table = packet.ints(np.array(state_columns(columns.states)).ravel()) if columns.states else None

    def finish() -> StepTokens:
        positions, query_starts, kv_lens = staged
        positions = positions.long()  # [T]
        width = blocks_of(columns, slots)

        def of_group(table: Tensor) -> ForwardContext:
            block_table = table[:, :width].index_select(0, row_slots)  # [B, width]
            slot_mapping = positions  # without a cache nothing reads it
            if slots.paged:
                blocks = block_table[row_of, positions // slots.block_size].long()  # [T]
                slot_mapping = blocks * slots.block_size + positions % slots.block_size
            return ForwardContext(
                positions=positions,
                query_starts=query_starts,
                kv_lens=kv_lens,
                block_table=block_table,
                slot_mapping=slot_mapping,
                block_size=slots.block_size,
                query_lens_host=columns.counts,
                kv_lens_host=columns.ends,
            )

        ids = slots.tokens[row_slots[row_of], positions].long()
        context = of_group(slots.block_table)
        if state_table is not None:
            context.states = StateRows(state_table.view(-1, len(counts)), columns.states)
        if adapters is not None:
            context.adapters = AdapterRows(adapters[: len(positions)], adapters[len(positions) :], runs)
        context.token_types = None if types is None else types.long()
        context.others = [of_group(table) for table in slots.block_tables[1:]]
        return ids, context

    return finish


def blocks_of(columns: Columns, slots: Slots) -> int:
    """The number of blocks that the longest sequence of a step has."""
    return -(-max(columns.ends) // slots.block_size) if slots.paged else 0
