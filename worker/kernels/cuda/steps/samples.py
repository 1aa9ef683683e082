"""Lays out what a graph reads of the rows that sample: options, random numbers, and where tokens go.

All of it comes from the states of slots (`worker/tables/recorded_forms.py`). A place that no row takes
belongs to nobody's slot, which takes the likeliest token; its token goes where nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from worker.kernels.cuda.launch import launch
from worker.sampling.top_k_top_p import Draws
from worker.tables.random_bits import STEP
from worker.tables.recorded_forms import INDEX, MIN_P, STREAM, TEMPERATURE, TOP_K, TOP_P
from worker.tables.slots import STATE_WORDS, Slots

CONSTANTS = (TOP_K, TEMPERATURE, TOP_P, MIN_P, STREAM, STEP)
"""What `lay_out_sample` ends with: the words of a state, and the distance of random numbers."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The tensors of R rows that sample, of each row one number."""

    flat: Tensor  # int64: where the next token goes in the table of tokens
    top_k: Tensor  # int32, as is the next
    points: Tensor
    temperature: Tensor  # float32, as are the next two
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def make(cls, target: torch.device, rows: int) -> Samples:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=target)

        return cls(
            flat=column(torch.int64),
            top_k=column(torch.int32),
            points=column(torch.int32),
            temperature=column(torch.float32),
            top_p=column(torch.float32),
            min_p=column(torch.float32),
        )

    def first(self, rows: int) -> Samples:
        """The tensors of fewer rows, at the beginning of the same memory."""
        return Samples(*(column[:rows] for column in self.columns()))

    def columns(self) -> list[Tensor]:
        """All tensors, in the order in which kernels take them."""
        return [getattr(self, each.name) for each in fields(self)]

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


@triton.jit
def _mix(state):
    """SplitMix64's finaliser, as `worker/tables/random_bits.py` has it."""
    state = (state ^ (state >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return state ^ (state >> 31)


@triton.jit
def _word(words, at: constexpr):
    """Half of a number of 64 bits."""
    return tl.load(words + at).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def lay_out_sample(
    state, row, real, index, place, flat_ptr, top_k_ptr, points_ptr, temperature_ptr, top_p_ptr, min_p_ptr,
    TOP_K: constexpr, TEMPERATURE: constexpr, TOP_P: constexpr, MIN_P: constexpr, STREAM: constexpr,
    STEP: constexpr,
):  # fmt: skip
    """Lay out a row whose slot has this state: output token number `index`, which goes to `place`."""
    tl.store(flat_ptr + row, place)
    drawn = _word(state, STREAM) | (_word(state, STREAM + 1) << 32)  # pyright: ignore
    drawn += (index + 1).to(tl.uint64) * tl.full([], STEP, tl.uint64)
    tl.store(points_ptr + row, (_mix(drawn) >> 33).to(tl.int32))  # pyright: ignore
    tl.store(top_k_ptr + row, tl.load(state + TOP_K))
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    tl.store(temperature_ptr + row, tl.where(real, temperature, 0.0))
    tl.store(top_p_ptr + row, tl.load(state + TOP_P).to(tl.float32, bitcast=True))
    tl.store(min_p_ptr + row, tl.load(state + MIN_P).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["width", "nobody"])
def lay_out_samples(
    held_ptr, states_ptr, flat_ptr, top_k_ptr, points_ptr, temperature_ptr, top_p_ptr, min_p_ptr, width,
    nobody, WORDS: constexpr, INDEX: constexpr, TOP_K: constexpr, TEMPERATURE: constexpr, TOP_P: constexpr,
    MIN_P: constexpr, STREAM: constexpr, STEP: constexpr,
):  # fmt: skip
    """Lay out a row whose slot has the state that is true after the step."""
    row = tl.program_id(0)
    slot = tl.load(held_ptr + row).to(tl.int64)
    real = slot != nobody
    state = states_ptr + slot * WORDS
    place = slot * width + tl.where(real, tl.load(state), 1)
    index = tl.load(state + INDEX) - 1
    lay_out_sample(  # pyright: ignore
        state, row, real, index, place, flat_ptr, top_k_ptr, points_ptr, temperature_ptr, top_p_ptr,
        min_p_ptr, TOP_K, TEMPERATURE, TOP_P, MIN_P, STREAM, STEP,
    )  # fmt: skip


def lay_out_from_states(held: Tensor, states: Tensor, slots: Slots, samples: Samples) -> None:
    """Launch the layout of the rows that sample: `held` are their slots, `states` hold what is true after."""
    launch(
        lay_out_samples,
        (len(held),),
        *(held, states, *samples.columns()),
        *(slots.width, slots.dummy),
        *(STATE_WORDS, INDEX, *CONSTANTS),
        num_warps=1,
    )
