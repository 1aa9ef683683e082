"""Lays out a step of single tokens in one launch, from its form and the tables alone.

A program reads its row's slot and that slot's state (`worker/tables/states.py`), writes what layers and the
draw read of the row, and counts the state on. Rows that are filled up belong to nobody's slot: they compute
the first position of a text that has one block, the scratch block, and no state of theirs changes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from worker.kernels.cuda.launch import launch
from worker.sampling.points import STEP
from worker.tables.slots import Slots
from worker.tables.states import INDEX, MIN_P, STREAM, TEMPERATURE, TOP_K, TOP_P, WORDS

_BLOCK = 128
"""The entries of a block table that are copied at a time."""
_ALIGNED = 4
"""The words of which the beginning of a column of a form is a multiple."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The tensors of a step of R single tokens, of each row one number if nothing else is said."""

    ids: Tensor  # int64, as are the next three
    positions: Tensor
    slot_mapping: Tensor
    flat: Tensor  # where the next token goes in the table of tokens
    kv_lens: Tensor  # int32, as are the next three
    block_table: Tensor  # [R, most blocks]
    top_k: Tensor
    points: Tensor
    temperature: Tensor  # float32, as are the next two
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def make(cls, target: torch.device, rows: int, most_blocks: int) -> Rows:
        def column(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(rows, *width, dtype=dtype, device=target)

        return cls(
            ids=column(torch.int64),
            positions=column(torch.int64),
            slot_mapping=column(torch.int64),
            flat=column(torch.int64),
            kv_lens=column(torch.int32),
            block_table=column(torch.int32, most_blocks),
            top_k=column(torch.int32),
            points=column(torch.int32),
            temperature=column(torch.float32),
            top_p=column(torch.float32),
            min_p=column(torch.float32),
        )

    def first(self, rows: int) -> Rows:
        """The tensors of a smaller step, at the beginning of the same memory."""
        pieces: dict[str, Tensor] = {each.name: getattr(self, each.name)[:rows] for each in fields(self)}
        return Rows(**pieces)


@triton.jit
def _mix(state):
    """SplitMix64's finaliser, as `worker/sampling/points.py` has it."""
    state = (state ^ (state >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return state ^ (state >> 31)


@triton.jit
def _word(words, at: constexpr):
    """Half of a number of 64 bits."""
    return tl.load(words + at).to(tl.uint32, bitcast=True).to(tl.uint64)


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
    form_ptr, states_ptr, tokens_ptr, table_ptr, ids_ptr, positions_ptr, mapping_ptr, flat_ptr, lens_ptr,
    own_table_ptr, top_k_ptr, points_ptr, temperature_ptr, top_p_ptr, min_p_ptr, width, most_blocks, nobody,
    column, PAGE: constexpr, BLOCK: constexpr, WORDS: constexpr, INDEX: constexpr,
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
    tl.store(flat_ptr + row, slot * width + length + 1)
    tl.store(lens_ptr + row, length + 1)
    drawn = _word(state, STREAM) | (_word(state, STREAM + 1) << 32)  # pyright: ignore
    drawn += (index + 1).to(tl.uint64) * tl.full([], STEP, tl.uint64)
    tl.store(points_ptr + row, (_mix(drawn) >> 33).to(tl.int32))  # pyright: ignore
    tl.store(top_k_ptr + row, tl.load(state + TOP_K))
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    tl.store(temperature_ptr + row, tl.where(real, temperature, 0.0))
    tl.store(top_p_ptr + row, tl.load(state + TOP_P).to(tl.float32, bitcast=True))
    tl.store(min_p_ptr + row, tl.load(state + MIN_P).to(tl.float32, bitcast=True))
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
        *(rows.ids, rows.positions, rows.slot_mapping, rows.flat, rows.kv_lens, rows.block_table),
        *(rows.top_k, rows.points, rows.temperature, rows.top_p, rows.min_p),
        *(slots.width, slots.most_blocks, slots.dummy, -(-count // _ALIGNED) * _ALIGNED),
        *(slots.block_size, _BLOCK),
        *(WORDS, INDEX, TOP_K, TEMPERATURE, TOP_P, MIN_P, STREAM, STEP),
        num_warps=1,
    )
