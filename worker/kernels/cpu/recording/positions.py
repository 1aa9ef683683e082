"""Lays a step's tokens out by `csrc/layout.c`: their ids, positions, and places in the cache.

Small steps lie in the same memory each time, so that a recording of one can be replayed for the next
(`worker/kernels/cpu/recording/recorder.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from models.context import ForwardContext
from worker.kernels.cpu.library import LONG, POINTER, Library
from worker.tables.positions import Columns, StepTokens, blocks_of
from worker.tables.slots import Slots
from worker.tables.staging import Packet

MOST_TOKENS = 512
"""The tokens of the largest small step: in larger ones, Python takes little time beside the computing."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors that a model reads of a step with T tokens of B sequences, and their addresses."""

    ids: Tensor  # [T] int64, as are the next two
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor  # [B + 1] int32
    kv_lens: Tensor  # [B] int32
    block_table: Tensor  # [B, blocks] int32
    addresses: tuple[int, ...]

    @classmethod
    def make(cls, tokens: int, rows: int, blocks: int) -> Inputs:
        ids, positions, slot_mapping = torch.zeros(3, tokens, dtype=torch.int64)
        query_starts, kv_lens = torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        block_table = torch.zeros(rows, blocks, dtype=torch.int32)
        return cls._of(ids, positions, slot_mapping, query_starts, kv_lens, block_table)

    def first(self, tokens: int, rows: int) -> Inputs:
        """The inputs of a smaller step at the beginning of the same memory."""
        return self._of(
            self.ids[:tokens],
            self.positions[:tokens],
            self.slot_mapping[:tokens],
            self.query_starts[: rows + 1],
            self.kv_lens[:rows],
            self.block_table[:rows],
        )

    def step_tokens(self, block_size: int, counts: list[int], ends: list[int]) -> StepTokens:
        """The ids, and the context of a step in which sequences get `counts` tokens and then have `ends`."""
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
    """The CPU's `worker.tables.positions.LayOut`. It writes where models read, so it needs no packet."""

    def __init__(self, library: Library, slots: Slots) -> None:
        self._slots = slots
        self._run = library.function(
            "lay_out",
            *(POINTER, LONG, POINTER, LONG, POINTER, LONG, LONG),  # rows, tables
            *(POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, LONG, LONG),  # results
            quick=True,
        )
        largest = Inputs.make(MOST_TOKENS, MOST_TOKENS, slots.most_blocks)
        self.fixed_inputs = lru_cache(maxsize=256)(largest.first)
        """The function from numbers of tokens and rows to the inputs of all small steps of that size."""

    def small_batch(self, tokens: int, rows: int) -> StepTokens:
        """The ids and the context of a small step: any values, and nothing in the lists of the host."""
        return self.fixed_inputs(tokens, rows).step_tokens(self._slots.block_size, [], [])

    def __call__(self, columns: Columns, slots: Slots, packet: Packet) -> Callable[[], StepTokens]:
        return lambda: self._lay_out(columns)

    def _lay_out(self, columns: Columns) -> StepTokens:
        slots, rows, tokens = self._slots, len(columns.slots), columns.query_starts[-1]
        blocks = blocks_of(columns, slots)
        is_small = tokens <= MOST_TOKENS
        inputs = self.fixed_inputs(tokens, rows) if is_small else Inputs.make(tokens, rows, blocks)
        table = array("i", columns.slots + columns.starts + columns.counts)
        self._run(
            *(table.buffer_info()[0], rows, slots.tokens.data_ptr(), slots.width),
            *(slots.block_table.data_ptr(), slots.most_blocks, slots.block_size if slots.paged else 0),
            *(*inputs.addresses, blocks, inputs.block_table.shape[1]),
        )
        return inputs.step_tokens(slots.block_size, columns.counts, columns.ends)
