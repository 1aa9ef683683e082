"""The memory of states: what layers without keys and values keep of each sequence, in one row for each place.

The first places belong to slots, the next one to nobody's slot, and those behind them to states that are
remembered: copies of what a slot had at the end of some prefix, for prompts that begin alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from models.layers.state import StateLayer
from worker.cache_tiers.block_files import Bytes
from worker.capacity import GIB, CacheBudget, WorkerLimits
from worker.options import WorkerOptions

logger = logging.getLogger(__name__)

_ALIGNED = 16
"""The numbers of which each state's beginning is a multiple: a line of the processor's cache."""
_MOST_OF_BUDGET = 2
"""States of slots take at most half of the memory for caches; there are fewer slots otherwise."""
_REMEMBERED_PART = 4
"""Remembered states take at most a quarter of what those of slots leave."""
_MOST_REMEMBERED = 4096
"""More are of no use by default: tiny models would have millions."""
_NO_LIMIT = 1 << 30
"""The number of places that a rank without such layers has room for."""


class StateMemory:
    """States of all layers, bound to them."""

    def __init__(
        self,
        layers: Sequence[StateLayer],
        places: int,
        allocate: Callable[[int], Tensor],
        guesses: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: the type of what layers keep of a step's `guesses`; None: a step has none."""
        shapes = [shape for layer in layers for shape in layer.state_shapes()]
        starts = [0, *accumulate(map(_padded, shapes))]
        self._rows = allocate(places * starts[-1] * 4).view(torch.float32).view(places, starts[-1])
        states = iter(
            self._rows[:, start : start + prod(shape)].unflatten(1, shape)
            for start, shape in zip(starts, shapes, strict=False)
        )
        for layer in layers:
            layer.states = [next(states) for _ in layer.state_shapes()]
        self._inputs = torch.empty(0)
        if dtype is not None:
            self._inputs = allocate(guess_bytes(layers, guesses, dtype)).view(dtype)
        begin = 0
        for layer in layers if dtype is not None else ():
            sizes = [guesses * width for width in layer.input_widths()]
            pieces = self._inputs[begin : begin + sum(sizes)].split(sizes)
            layer.guesses = [piece.view(guesses, -1) for piece in pieces]
            begin += sum(sizes)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._inputs.nbytes

    def rows(self, first: int) -> Tensor:
        """The states [places, numbers] of the places from this one on."""
        return self._rows[first:]

    def remembered(self, first: int) -> Bytes:
        """The bytes [places, bytes] of these states, in the host's memory."""
        return self.rows(first).view(torch.uint8).numpy()


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The number of states that there is memory for, alike on all ranks."""

    slots: int
    """The sequences that run at a time."""
    remembered: int
    """The states that can be remembered for prompts that begin alike."""
    guesses: int
    """The guesses of a step of which inputs are kept."""
    nbytes: int
    """The bytes of this rank's states, and of these inputs."""


def plan_states(
    layers: Sequence[StateLayer],
    limits: WorkerLimits,
    asked: WorkerOptions,
    budget: CacheBudget,
    minimum: Callable[[int], int],
    guessed: torch.dtype | None,
) -> StatePlan:
    """Decide how many states have room in `budget`, on all ranks as many (`minimum`).

    `guessed`: the type of what is kept of guesses; None: steps have none.
    """
    remembered = slots = _NO_LIMIT
    each = place_bytes(layers)
    inputs = 0 if guessed is None else guess_bytes(layers, limits.most_rows, guessed)
    if layers:
        whole = budget.less(inputs)
        slots = slots_for(limits, asked.max_num_seqs, each, whole)
        remembered = places_for(asked.state_snapshots, each, whole.less((slots + 1) * each))
    remembered = minimum(remembered)
    slots = min(limits.max_num_seqs, minimum(slots))
    if layers:
        sizes = slots, remembered, each / (1 << 20)
        logger.info("states of %d sequences, and of %d prefixes that are remembered: %.2f MiB each", *sizes)
    return StatePlan(slots, remembered, limits.most_rows, (slots + 1 + remembered) * each + inputs)


def place_bytes(layers: Sequence[StateLayer]) -> int:
    """The bytes of a place."""
    return 4 * sum(_padded(shape) for layer in layers for shape in layer.state_shapes())


def guess_bytes(layers: Sequence[StateLayer], guesses: int, dtype: torch.dtype) -> int:
    """The bytes of what is kept of so many guesses."""
    return guesses * dtype.itemsize * sum(width for layer in layers for width in layer.input_widths())


def slots_for(limits: WorkerLimits, asked: int | None, nbytes: int, budget: CacheBudget) -> int:
    """The slots for which there is memory, at `nbytes` each. `asked`: the operator's number of them."""
    most = max(1, budget.nbytes // _MOST_OF_BUDGET // nbytes - 1)
    if limits.max_num_seqs <= most:
        return limits.max_num_seqs
    shortage = (
        f"the states of {limits.max_num_seqs} sequences need {limits.max_num_seqs * nbytes / GIB:.2f} GiB, "
        f"more than half of the {budget.nbytes / GIB:.2f} GiB for caches"
    )
    if asked is not None:
        raise ValueError(f"{shortage}: raise {budget.flag}, or lower --max-num-seqs to {most} at most")
    logger.info("%s: %d sequences run at a time; raise %s for more", shortage, most, budget.flag)
    return most


def places_for(asked: int | None, nbytes: int, budget: CacheBudget) -> int:
    """The number of states that are remembered: as asked for, or what a part of this memory holds."""
    if asked is None:
        return min(budget.nbytes // _REMEMBERED_PART // nbytes, _MOST_REMEMBERED)
    if asked * nbytes > budget.nbytes:
        raise ValueError(
            f"--state-snapshots {asked} needs {asked * nbytes / GIB:.2f} GiB, and {budget.nbytes / GIB:.2f} "
            f"GiB are left for it and for the KV cache: lower it, or raise {budget.flag}"
        )
    return asked


def _padded(shape: tuple[int, ...]) -> int:
    return -(-prod(shape) // _ALIGNED) * _ALIGNED
