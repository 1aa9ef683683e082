"""Kernels that lay out a step within a graph, from its form and the tables alone.

Rows that are filled up belong to nobody's slot: they compute the first position of a text that has one block,
the scratch block, take the likeliest token, which goes where nobody reads, and no state of theirs changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.context import StateRows
from worker.kernels.cuda.attention_plan import Plan, enough_rows, least_keys
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.steps import recorded_forms
from worker.sampling.top_k_top_p import Draws
from worker.steps.compute import UnreadStep
from worker.tables import random_bits
from worker.tables.slots import PROGRESS_WORDS, Slots

_COPIED = 128
"""The entries of a block table that are copied at a time."""
_MOST_ROWS, _ENTRIES = 512, 16
"""The most single tokens of a step, and the entries of its plan of attention that a program makes."""
_ALIGNED = 4
"""The words of which the beginning of a column of a form is a multiple."""
_WORDS: constexpr = constexpr(PROGRESS_WORDS)
_INDEX: constexpr = constexpr(recorded_forms.INDEX)
_TOP_K: constexpr = constexpr(recorded_forms.TOP_K)
_TEMPERATURE: constexpr = constexpr(recorded_forms.TEMPERATURE)
_TOP_P: constexpr = constexpr(recorded_forms.TOP_P)
_MIN_P: constexpr = constexpr(recorded_forms.MIN_P)
_STREAM: constexpr = constexpr(recorded_forms.STREAM)
_SHIFT: constexpr = constexpr(recorded_forms.SHIFT)
_STEP: constexpr = constexpr(random_bits.STEP)


class StepTensors(NamedTuple):
    """The tensors that layers read of a step of T tokens of R rows."""

    ids: Tensor  # [T] int64, as are the next two
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor  # [R, most blocks] int32

    @classmethod
    def make(
        cls, target: torch.device, tokens: int, rows: int, most_blocks: int, groups: int = 1
    ) -> list[StepTensors]:
        """The tensors for each group of layers, which have slot mappings and block tables of their own."""
        ids, positions, *mappings = torch.zeros(2 + groups, tokens, dtype=torch.int64, device=target)
        tables = (torch.zeros(rows, most_blocks, dtype=torch.int32, device=target) for _ in mappings)
        return [cls(ids, positions, *own) for own in zip(mappings, tables, strict=True)]

    def first(self, tokens: int, rows: int) -> StepTensors:
        """The tensors of a smaller step, at the beginning of the same memory."""
        ids, positions, slot_mapping = (column[:tokens] for column in self[:3])
        return StepTensors(ids, positions, slot_mapping, self.block_table[:rows])


def unread_step(
    groups: Sequence[StepTensors],
    query_starts: Tensor,
    kv_lens: Tensor,
    block_size: int,
    plan: Plan,
    states: Tensor | None,
) -> UnreadStep:
    """The context of a step that is laid out in these tensors of each group of layers.

    `states`: the table of the places of states, as `models.state_rows.state_columns` has it, if layers have
    some.
    """
    step, *others = (
        UnreadStep(
            positions=tensors.positions,
            query_starts=query_starts,
            kv_lens=kv_lens,
            block_table=tensors.block_table,
            slot_mapping=tensors.slot_mapping,
            block_size=block_size,
            query_lens_host=[],
            kv_lens_host=[],
            plan=plan,
        )
        for tensors in groups
    )
    step.others.extend(others)
    step.states = None if states is None else StateRows(states, [])
    return step


class SampleTensors(NamedTuple):
    """The tensors that the draw reads of R rows that sample, of each row one number."""

    flat: Tensor  # int64: where the next token goes in the table of tokens
    top_k: Tensor  # int32, as is the next
    points: Tensor
    temperature: Tensor  # float32, as are the next two
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def make(cls, target: torch.device, rows: int) -> SampleTensors:
        types = (torch.int64, torch.int32, torch.int32, torch.float32, torch.float32, torch.float32)
        return cls(*(torch.zeros(rows, dtype=dtype, device=target) for dtype in types))

    def first(self, rows: int) -> SampleTensors:
        """The tensors of fewer rows, at the beginning of the same memory."""
        return SampleTensors(*(column[:rows] for column in self))

    def draws(self) -> Draws:
        """All rows, with whatever options they have; the kernel that draws needs no summary of them."""
        return Draws(
            rows=torch.arange(len(self.flat), dtype=torch.int32, device=self.flat.device),
            temperature=self.temperature[:, None],
            top_p=self.top_p[:, None],
            top_k=self.top_k[:, None],
            min_p=self.min_p[:, None],
            points=self.points[:, None],
            largest_k=0,
            has_min_p_or_top_k=True,
            has_top_p=True,
            bounded=False,
        )


@triton.jit(do_not_specialize=["width", "most_blocks", "nobody", "column", "blocks"])
def lay_out_rows(
    form_ptr, states_ptr, tokens_ptr, table_ptr, step, lens_ptr, width, most_blocks, nobody, column, blocks,
    PAGE: constexpr, BLOCK: constexpr, LAST: constexpr,
):  # fmt: skip
    """Lay out one row of a step of single tokens, and count its slot's state on if this group is the LAST.

    Its new block stands in the form from `blocks` on. The program runs in one warp, so that what is counted
    on at the end was read by all before.
    """
    row = tl.program_id(0)
    slot = tl.load(form_ptr + row).to(tl.int64)
    place, block = tl.load(form_ptr + column + row), tl.load(form_ptr + blocks + row)
    real = slot != nobody
    state = states_ptr + slot * _WORDS
    length, index = tl.where(real, tl.load(state), 0), tl.load(state + _INDEX)
    table, own = table_ptr + slot * most_blocks, step.block_table + row.to(tl.int64) * most_blocks
    last = length // PAGE
    page = tl.where(last == place, block, tl.load(table + last)).to(tl.int64)
    if place >= 0:  # this entry has just become `block`
        tl.store(table + place, block)
    for start in range(0, last + 1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        held = tl.load(table + at, mask=at <= last, other=0)
        tl.store(own + at, tl.where(at == place, block, held), mask=at <= last)
    tl.store(step.ids + row, tl.load(tokens_ptr + slot * width + length).to(tl.int64))
    tl.store(step.positions + row, (length + tl.where(real, tl.load(state + _SHIFT), 0)).to(tl.int64))
    tl.store(step.slot_mapping + row, page * PAGE + length % PAGE)
    tl.store(lens_ptr + row, length + 1)
    if real & LAST:
        tl.store(state, length + 1)
        tl.store(state + _INDEX, index + 1)


def lay_out_single_tokens(
    form: Tensor, states: Tensor, slots: Slots, steps: Sequence[StepTensors], lens: Tensor
) -> None:
    """Launch the layout of as many rows as `lens` [R] int32 has, in one program each."""
    count, column = len(lens), -(-len(lens) // _ALIGNED) * _ALIGNED
    for group, step in enumerate(steps):
        launch(
            lay_out_rows,
            (count,),
            *(form, states, slots.tokens, slots.block_tables[group], step, lens),
            *(slots.width, slots.most_blocks, slots.dummy, column, (2 + group) * column),
            *(slots.block_size, _COPIED, group == len(steps) - 1),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["count", "enough", "least", "room"])
def lay_out_entries(
    lens_ptr, rows_ptr, words_ptr, count, enough, least, room, ROWS: constexpr, ENTRIES: constexpr
):  # fmt: skip
    """Split the keys of `count` rows as `attention_plan.split_rows` does, and write ENTRIES of the `room`.

    What is left over belongs to no row.
    """
    row = tl.arange(0, ROWS)
    keys = tl.load(lens_ptr + row, mask=row < count, other=0)
    there = tl.sum((keys > 1).to(tl.int32), 0)  # those of nobody have one
    total = tl.sum(keys.to(tl.int64), 0) * tl.where(there >= enough, 2, 1)
    size = tl.maximum(tl.cdiv(total, enough), least).to(tl.int32)
    pieces = tl.cdiv(keys, size)
    split = tl.where(pieces > 1, pieces, 0)
    ends = tl.where(pieces > 1, tl.cumsum(split, 0), tl.sum(split, 0) + tl.cumsum(pieces - split, 0))
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    number = entry[:, None] - (ends - pieces)[None, :]
    own = (number >= 0) & (number < pieces[None, :])
    found = tl.max(tl.where(own, row[None, :], -1), 1)
    word = tl.max(tl.where(own, number | ((pieces - 1) << 16)[None, :], 0), 1)
    tl.store(rows_ptr + entry, found, mask=entry < room)
    tl.store(words_ptr + entry, word, mask=entry < room)


def lay_out_splits(lens: Tensor, plan: Plan, processors: int) -> None:
    """Launch the layout of attention for single tokens of rows of these lengths, for each kind of heads."""
    for (heads, _, _), (blocks,) in plan.items():
        room = len(blocks.rows)
        launch(
            lay_out_entries,
            (-(-room // _ENTRIES),),
            *(lens, blocks.rows, blocks.tokens, len(lens), enough_rows(heads, processors)),
            *(least_keys(heads), room, _MOST_ROWS, _ENTRIES),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["width", "most_blocks", "nobody", "count"])
def lay_out_any(
    slots_ptr, starts_ptr, ends_ptr, rows_ptr, tokens_ptr, table_ptr, step, width, most_blocks, nobody, count,
    PAGE: constexpr, BLOCK: constexpr,
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
        tl.store(step.ids + program, tl.load(tokens_ptr + slot * width + position).to(tl.int64))
        tl.store(step.positions + program, position.to(tl.int64))
        if PAGE > 0:
            page = tl.load(table_ptr + slot * most_blocks + position // PAGE).to(tl.int64)
            tl.store(step.slot_mapping + program, page * PAGE + position % PAGE)
    elif PAGE > 0:
        row = program - count
        blocks = tl.cdiv(tl.load(ends_ptr + row), PAGE)
        table = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * most_blocks
        own = step.block_table + row.to(tl.int64) * most_blocks
        for start in range(0, blocks, BLOCK):
            at = start + tl.arange(0, BLOCK)
            held = tl.load(table + at, mask=at < blocks, other=0)
            tl.store(own + at, held, mask=at < blocks)


def lay_out_any_rows(
    held: Tensor,
    query_starts: Tensor,
    ends: Tensor,
    rows: Tensor,
    slots: Slots,
    steps: Sequence[StepTensors],
) -> None:
    """Launch the layout of a step of any rows.

    `held` [R]: the slots of rows, which begin with the tokens `query_starts` [R + 1] and have `ends` [R]
    tokens then. `rows` [T]: the row of each token, -1 for none.
    """
    count = len(rows)
    for table, step in zip(slots.block_tables, steps, strict=True):
        launch(
            lay_out_any,
            (count + (len(held) if slots.paged else 0),),
            *(held, query_starts, ends, rows, slots.tokens, table, step),
            *(slots.width, slots.most_blocks, slots.dummy, count),
            *(slots.block_size if slots.paged else 0, _COPIED),
            num_warps=1,
        )


@triton.jit
def _mix(state):
    """SplitMix64's finaliser, as `worker/tables/random_bits.py` has it."""
    state = (state ^ (state >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return state ^ (state >> 31)


@triton.jit
def _half_of_word(words):
    """Half of a number of 64 bits."""
    return tl.load(words).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit(do_not_specialize=["width", "nobody"])
def lay_out_samples(held_ptr, states_ptr, samples, width, nobody):
    """Lay out a row whose slot has the state that is true after the step."""
    row = tl.program_id(0)
    slot = tl.load(held_ptr + row).to(tl.int64)
    real = slot != nobody
    state = states_ptr + slot * _WORDS
    tl.store(samples.flat + row, slot * width + tl.where(real, tl.load(state), 1))
    drawn = _half_of_word(state + _STREAM) | (_half_of_word(state + _STREAM + 1) << 32)  # pyright: ignore
    drawn += tl.load(state + _INDEX).to(tl.uint64) * tl.full([], _STEP, tl.uint64)
    tl.store(samples.points + row, (_mix(drawn) >> 33).to(tl.int32))  # pyright: ignore
    tl.store(samples.top_k + row, tl.load(state + _TOP_K))
    temperature = tl.load(state + _TEMPERATURE).to(tl.float32, bitcast=True)
    tl.store(samples.temperature + row, tl.where(real, temperature, 0.0))
    tl.store(samples.top_p + row, tl.load(state + _TOP_P).to(tl.float32, bitcast=True))
    tl.store(samples.min_p + row, tl.load(state + _MIN_P).to(tl.float32, bitcast=True))


def lay_out_sampling(held: Tensor, states: Tensor, slots: Slots, samples: SampleTensors) -> None:
    """Launch the layout of the rows that sample: `held` are their slots, `states` hold what is true after.

    All that a row needs comes from the state of its slot (`worker/kernels/cuda/steps/recorded_forms.py`).
    """
    launch(lay_out_samples, (len(held),), held, states, samples, slots.width, slots.dummy, num_warps=1)
