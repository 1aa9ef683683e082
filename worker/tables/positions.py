"""The positions of a step's tokens, and the context in which a model reads them.

`lay_out` computes them by torch, on any device. In a small step its dozen operations cost more than all that
they compute, so the CPU has its own (`worker/kernels/cpu/recording.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from models.context import ForwardContext
from worker.protocol import SeqStep
from worker.tables.slots import Slots
from worker.tables.staging import Packet

Show = Callable[[ForwardContext], None]
"""The type of a function that shows a model what it reads beside tokens, once that is on the device."""


class Read(Protocol):
    """A feature's reads of a step, beside its tokens and their places."""

    @property
    def in_single(self) -> bool:
        """Whether recorded steps of single tokens have it all by themselves."""
        ...

    @property
    def in_mixed(self) -> bool:
        """Whether recorded steps of any rows have."""
        ...

    def stage(self, packet: Packet, /) -> Show:
        """Send it with a step that is no recorded one."""
        ...


@dataclass(frozen=True, slots=True)
class PlainRead:
    """A read that is in no recorded step."""

    stage: Callable[[Packet], Show]
    in_single: bool = False
    in_mixed: bool = False


@dataclass(frozen=True, slots=True)
class TypeReads:
    """The types of tokens, which tell the second texts of pairs from the first."""

    types: Sequence[int]  # [T]: 1 in the second text of a pair, else 0
    in_single: bool = False
    in_mixed: bool = True

    def stage(self, packet: Packet) -> Show:
        types = packet.ints(self.types)

        def show(context: ForwardContext) -> None:
            context.token_types = types.long()

        return show


_R = TypeVar("_R", bound=Read)


@dataclass(slots=True)
class Columns:
    """The columns that layouts read: the fields of StepInput.seqs as lists, and features' reads."""

    slots: list[int]  # [B]
    starts: list[int]  # [B]
    counts: list[int]  # [B]
    ends: list[int]  # [B] tokens of each sequence once the step is done
    query_starts: list[int]  # [B + 1]
    sampling: Sequence[int] = ()  # the rows that sample
    pooling: Sequence[int] = ()  # the rows that complete a sequence to be pooled
    reads: list[Read] = field(default_factory=list[Read])

    @classmethod
    def of(cls, seqs: Sequence[SeqStep]) -> Columns:
        rows, end, samples, pools = len(seqs), 0, 0, 0
        columns = cls([0] * rows, [0] * rows, [0] * rows, [0] * rows, [0] * (rows + 1))
        for row, seq in enumerate(seqs):
            end += seq.count
            columns.slots[row], columns.starts[row], columns.counts[row] = seq.slot, seq.start, seq.count
            columns.ends[row], columns.query_starts[row + 1] = seq.start + seq.count, end
            samples += seq.samples
            pools += seq.pools
        if samples:
            every = range(rows)
            columns.sampling = every if samples == rows else [row for row in every if seqs[row].samples]
        if pools:
            columns.pooling = [row for row in range(rows) if seqs[row].pools]
        return columns

    def find(self, kind: type[_R]) -> _R | None:
        """Find what the step reads of some kind."""
        return next((each for each in self.reads if isinstance(each, kind)), None)


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
    staged = packet.ints(token_positions), packet.ints(query_starts), packet.ints(columns.ends)
    shows = [read.stage(packet) for read in columns.reads]

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
        context.others = [of_group(table) for table in slots.block_tables[1:]]
        for show in shows:
            show(context)
        return ids, context

    return finish


def blocks_of(columns: Columns, slots: Slots) -> int:
    """The number of blocks that the longest sequence of a step has."""
    return -(-max(columns.ends) // slots.block_size) if slots.paged else 0
