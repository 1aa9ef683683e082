"""Where the tokens of a step lie, by `csrc/layout.c`.

Steps that bring one new token to each of their sequences get the same memory each time, and so do small steps
of an encoder's texts: what was written down of one holds for the next (`worker/kernels/cpu/replay.py` and
`replay_texts.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.context import ForwardContext
from worker.kernels.cpu.library import LONG, POINTER, Library
from worker.tables.positions import Columns, Laid, blocks_of
from worker.tables.slots import Slots
from worker.tables.staging import Packet

MOST_TOKENS = 512
"""Of a small step of texts: beyond, what Python costs is little beside the computing."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a model reads of T tokens of B sequences, and where it lies."""

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    block_table: Tensor
    addresses: tuple[int, ...]

    @classmethod
    def made(cls, tokens: int, rows: int, blocks: int) -> Inputs:
        ids, positions, slot_mapping = torch.zeros(3, tokens, dtype=torch.int64)
        query_starts, kv_lens = torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        block_table = torch.zeros(rows, blocks, dtype=torch.int32)
        return cls._of(ids, positions, slot_mapping, query_starts, kv_lens, block_table)

    def first(self, tokens: int, rows: int) -> Inputs:
        """Those of the first tokens, and of the first sequences, in the same memory."""
        return self._of(
            self.ids[:tokens],
            self.positions[:tokens],
            self.slot_mapping[:tokens],
            self.query_starts[: rows + 1],
            self.kv_lens[:rows],
            self.block_table[:rows],
        )

    def laid(self, block_size: int, counts: list[int], ends: list[int]) -> Laid:
        return self.ids, ForwardContext(
            positions=self.positions,
            query_starts=self.query_starts,
            kv_lens=self.kv_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            block_size=block_size,
            query_lens_host=counts,
            kv_lens_host=ends,
        )

    @classmethod
    def _of(cls, *tensors: Tensor) -> Inputs:
        return cls(*tensors, addresses=tuple(tensor.data_ptr() for tensor in tensors))


class Layout:
    """In place of `worker.tables.positions.lay_out`. On the host nothing needs to be staged."""

    def __init__(self, library: Library, slots: Slots) -> None:
        self._slots = slots
        self._run = library.function(
            "lay_out",
            *(POINTER, LONG, POINTER, LONG, POINTER, LONG, LONG),  # rows, tables
            *(POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, LONG, LONG),  # results
            quick=True,
        )
        most = (slots.count, slots.count) if slots.paged else (MOST_TOKENS, MOST_TOKENS)
        self._kept = Inputs.made(*most, slots.most_blocks)
        self._by_rows: dict[int, Inputs] = {}

    def kept(self, rows: int) -> Inputs:
        """Of every step that brings one new token to each of so many sequences."""
        inputs = self._by_rows.get(rows)
        if inputs is None:
            inputs = self._by_rows[rows] = self._kept.first(rows, rows)
        return inputs

    def texts(self, lengths: Sequence[int]) -> Laid:
        """Where a small step of such texts lies. Nothing is written there."""
        inputs = self._kept.first(sum(lengths), len(lengths))
        return inputs.laid(self._slots.block_size, list(lengths), list(lengths))

    def __call__(self, columns: Columns, slots: Slots, packet: Packet) -> Callable[[], Laid]:
        return lambda: self._lay_out(columns)

    def _lay_out(self, columns: Columns) -> Laid:
        slots, rows, tokens = self._slots, len(columns.slots), columns.query_starts[-1]
        blocks = blocks_of(columns, slots)
        inputs = self._place(tokens, rows, blocks)
        table = array("i", columns.slots + columns.starts + columns.counts)
        self._run(
            *(table.buffer_info()[0], rows, slots.tokens.data_ptr(), slots.width),
            *(slots.block_table.data_ptr(), slots.most_blocks, slots.block_size if slots.paged else 0),
            *(*inputs.addresses, blocks, inputs.block_table.shape[1]),
        )
        return inputs.laid(slots.block_size, columns.counts, columns.ends)

    def _place(self, tokens: int, rows: int, blocks: int) -> Inputs:
        if self._slots.paged and rows == tokens <= self._slots.count:
            return self.kept(rows)
        if not self._slots.paged and tokens <= MOST_TOKENS:
            return self._kept.first(tokens, rows)
        return Inputs.made(tokens, rows, blocks)
