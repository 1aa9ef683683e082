"""Lays out a step of any rows in one launch, from its form and the tables alone.

A program writes what layers read of its token; others copy the cache blocks that each row has. Tokens that
are filled up belong to nobody's slot: each computes the first position of a text that has one block, the
scratch block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from worker.kernels.cuda.launch import launch
from worker.tables.slots import Slots

_BLOCK = 128
"""The entries of a block table that are copied at a time."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tensors that layers read of a step of T tokens of R rows."""

    ids: Tensor  # [T] int64, as are the next two
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor  # [R, most blocks] int32

    @classmethod
    def make(cls, target: torch.device, tokens: int, rows: int, most_blocks: int) -> Tokens:
        ids, positions, slot_mapping = (
            torch.zeros(tokens, dtype=torch.int64, device=target) for _ in range(3)
        )
        block_table = torch.zeros(rows, most_blocks, dtype=torch.int32, device=target)
        return cls(ids, positions, slot_mapping, block_table)

    def first(self, tokens: int, rows: int) -> Tokens:
        """The tensors of a smaller step, at the beginning of the same memory."""
        ids, positions, slot_mapping = (
            each[:tokens] for each in (self.ids, self.positions, self.slot_mapping)
        )
        return Tokens(ids, positions, slot_mapping, self.block_table[:rows])


@triton.jit(do_not_specialize=["width", "most_blocks", "nobody", "count"])
def lay_out_any(
    slots_ptr, starts_ptr, ends_ptr, rows_ptr, tokens_ptr, table_ptr, ids_ptr, positions_ptr, mapping_ptr,
    own_table_ptr, width, most_blocks, nobody, count, PAGE: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Lay out one of `count` tokens, or copy the blocks of a row. PAGE is 0 for texts without a cache."""
    program = tl.program_id(0)
    if program < count:
        row = tl.load(rows_ptr + program)
        real = row >= 0
        row = tl.maximum(row, 0)
        slot = tl.where(real, tl.load(slots_ptr + row), nobody).to(tl.int64)
        behind = tl.load(starts_ptr + row + 1) - program  # tokens of the row from this one on
        position = tl.where(real, tl.load(ends_ptr + row) - behind, 0)
        tl.store(ids_ptr + program, tl.load(tokens_ptr + slot * width + position).to(tl.int64))
        tl.store(positions_ptr + program, position.to(tl.int64))
        if PAGE > 0:
            page = tl.load(table_ptr + slot * most_blocks + position // PAGE).to(tl.int64)
            tl.store(mapping_ptr + program, page * PAGE + position % PAGE)
    elif PAGE > 0:
        row = program - count
        blocks = tl.cdiv(tl.load(ends_ptr + row), PAGE)
        table = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * most_blocks
        own = own_table_ptr + row.to(tl.int64) * most_blocks
        for start in range(0, blocks, BLOCK):
            at = start + tl.arange(0, BLOCK)
            held = tl.load(table + at, mask=at < blocks, other=0)
            tl.store(own + at, held, mask=at < blocks)


def lay_out_step(
    held: Tensor, query_starts: Tensor, ends: Tensor, rows: Tensor, slots: Slots, tokens: Tokens
) -> None:
    """Launch the layout of a step.

    `held` [R]: the slots of rows, which begin with the tokens `query_starts` [R + 1] and have `ends` [R]
    tokens then. `rows` [T]: the row of each token, -1 for none.
    """
    count = len(rows)
    launch(
        lay_out_any,
        (count + (len(held) if slots.paged else 0),),
        *(held, query_starts, ends, rows, slots.tokens, slots.block_table),
        *(tokens.ids, tokens.positions, tokens.slot_mapping, tokens.block_table),
        *(slots.width, slots.most_blocks, slots.dummy, count),
        *(slots.block_size if slots.paged else 0, _BLOCK),
        num_warps=1,
    )
