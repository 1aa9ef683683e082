"""Lays out a step of single tokens in one launch, from its form and the tables alone.

A program reads its row's slot and that slot's state (`worker/tables/recorded_forms.py`), writes what layers
and the draw read of the row, and counts the state on. Rows that are filled up belong to nobody's slot: they
compute the first position of a text that has one block, the scratch block, and no state of theirs changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.steps.samples import CONSTANTS, Samples, lay_out_sample
from worker.tables.recorded_forms import INDEX
from worker.tables.slots import STATE_WORDS, Slots

_BLOCK = 128
"""The entries of a block table that are copied at a time."""
_ALIGNED = 4
"""The words of which the beginning of a column of a form is a multiple."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The tensors of a step of R single tokens, of each row one number if nothing else is said."""

    ids: Tensor  # int64, as are the next two
    positions: Tensor
    slot_mapping: Tensor
    kv_lens: Tensor  # int32, as is the next
    block_table: Tensor  # [R, most blocks]
    samples: Samples

    @classmethod
    def make(cls, target: torch.device, rows: int, most_blocks: int) -> Rows:
        def column(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(rows, *width, dtype=dtype, device=target)

        return cls(
            ids=column(torch.int64),
            positions=column(torch.int64),
            slot_mapping=column(torch.int64),
            kv_lens=column(torch.int32),
            block_table=column(torch.int32, most_blocks),
            samples=Samples.make(target, rows),
        )

    def first(self, rows: int) -> Rows:
        """The tensors of a smaller step, at the beginning of the same memory."""
        return Rows(
            ids=self.ids[:rows],
            positions=self.positions[:rows],
            slot_mapping=self.slot_mapping[:rows],
            kv_lens=self.kv_lens[:rows],
            block_table=self.block_table[:rows],
            samples=self.samples.first(rows),
        )


@triton.jit
def _copy_blocks(
    table, own, place, block, length, PAGE: constexpr, BLOCK: constexpr
):  # fmt: skip
    """Copy the entries that a row has so far, of which the one at `place` has just become `block`."""
    if place >= 0:
        tl.store(table + place, block)
    for start in range(0, length // PAGE + 1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at <= length // PAGE
        held = tl.load(table + at, mask=there, other=0)
        tl.store(own + at, tl.where(at == place, block, held), mask=there)


@triton.jit(do_not_specialize=["width", "most_blocks", "nobody", "column"])
def lay_out_rows(
    form_ptr, states_ptr, tokens_ptr, table_ptr, ids_ptr, positions_ptr, mapping_ptr, lens_ptr,
    own_table_ptr, flat_ptr, top_k_ptr, points_ptr, temperature_ptr, top_p_ptr, min_p_ptr, width, most_blocks,
    nobody, column, PAGE: constexpr, BLOCK: constexpr, WORDS: constexpr, INDEX: constexpr,
    TOP_K: constexpr, TEMPERATURE: constexpr, TOP_P: constexpr, MIN_P: constexpr, STREAM: constexpr,
    STEP: constexpr,
):  # fmt: skip
    """Lay out one row. It runs in one warp, so that what is counted on at the end was read by all before."""
    row = tl.program_id(0)
    slot = tl.load(form_ptr + row).to(tl.int64)
    place, block = tl.load(form_ptr + column + row), tl.load(form_ptr + 2 * column + row)
    real = slot != nobody
    state = states_ptr + slot * WORDS
    length, index = tl.where(real, tl.load(state), 0), tl.load(state + INDEX)
    here = length // PAGE
    held = tl.load(table_ptr + slot * most_blocks + here)
    page = tl.where(here == place, block, held).to(tl.int64)
    _copy_blocks(  # pyright: ignore
        table_ptr + slot * most_blocks, own_table_ptr + row.to(tl.int64) * most_blocks, place, block, length,
        PAGE, BLOCK,
    )  # fmt: skip
    tl.store(ids_ptr + row, tl.load(tokens_ptr + slot * width + length).to(tl.int64))
    tl.store(positions_ptr + row, length.to(tl.int64))
    tl.store(mapping_ptr + row, page * PAGE + length % PAGE)
    tl.store(lens_ptr + row, length + 1)
    lay_out_sample(  # pyright: ignore
        state, row, real, index, slot * width + length + 1, flat_ptr, top_k_ptr, points_ptr, temperature_ptr,
        top_p_ptr, min_p_ptr, TOP_K, TEMPERATURE, TOP_P, MIN_P, STREAM, STEP,
    )  # fmt: skip
    if real:
        tl.store(state, length + 1)
        tl.store(state + INDEX, index + 1)


def lay_out(form: Tensor, states: Tensor, slots: Slots, rows: Rows) -> None:
    """Launch the layout of as many rows as `rows` has, in one program each."""
    count = len(rows.ids)
    launch(
        lay_out_rows,
        (count,),
        *(form, states, slots.tokens, slots.block_table),
        *(rows.ids, rows.positions, rows.slot_mapping, rows.kv_lens, rows.block_table),
        *rows.samples.columns(),
        *(slots.width, slots.most_blocks, slots.dummy, -(-count // _ALIGNED) * _ALIGNED),
        *(slots.block_size, _BLOCK, STATE_WORDS, INDEX, *CONSTANTS),
        num_warps=1,
    )
