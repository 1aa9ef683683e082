"""The memory of states: what layers without keys and values keep of each sequence, in one row for each place.

The first places belong to slots, the next one to nobody's slot, and those behind them to states that are
remembered: copies of what a slot had at the end of some prefix, for prompts that begin alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from models.layers.state import StateLayer
from worker.config import WorkerConfig
from worker.devices.base import GIB, CacheBudget, Device
from worker.disk.block_files import Bytes
from worker.limits import WorkerLimits

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


def make_states(
    layers: Sequence[StateLayer],
    limits: WorkerLimits,
    config: WorkerConfig,
    budget: Callable[[], CacheBudget],
    minimum: Callable[[int], int],
    device: Device,
    dtype: torch.dtype,
) -> tuple[StateMemory | None, int | None, WorkerLimits]:
    """The memory of states, the number of those that can be remembered, and as many slots as have room.

    All ranks have the same numbers (`minimum`), and remember None if no rank has layers with states.
    `dtype`: the type of what is kept of guesses, if steps have some.
    """
    asked, guessed = config.options, dtype if _keeps_guesses(config, device) else None
    remembered = slots = _NO_LIMIT
    if layers:
        whole, nbytes = budget(), place_bytes(layers)
        if guessed is not None:
            whole = whole.less(guess_bytes(layers, limits.most_rows, guessed))
        slots = slots_for(limits, asked.max_num_seqs, nbytes, whole)
        remembered = places_for(asked.state_snapshots, nbytes, whole.less((slots + 1) * nbytes))
    remembered = minimum(remembered)
    limits = replace(limits, max_num_seqs=min(limits.max_num_seqs, minimum(slots)))
    if not layers:
        return None, None if remembered == _NO_LIMIT else remembered, limits
    sizes = limits.max_num_seqs, remembered, place_bytes(layers) / (1 << 20)
    logger.info("states of %d sequences, and of %d prefixes that are remembered: %.2f MiB each", *sizes)
    places = limits.max_num_seqs + 1 + remembered
    return StateMemory(layers, places, device.allocate, limits.most_rows, guessed), remembered, limits


def most_guesses(limits: WorkerLimits, config: WorkerConfig, device: Device, remembered: int | None) -> int:
    """How many guesses a step may have. `remembered`: None if no layer has states."""
    return limits.most_rows if remembered is None or _keeps_guesses(config, device) else 0


def _keeps_guesses(config: WorkerConfig, device: Device) -> bool:
    """Whether layers with states take guesses: on CPUs, where the host knows which hold.

    Stages before the last one learn that later, when a remembered state may be on its way to disk already.
    """
    place = config.place
    at_once = place.stages == 1 or config.options.kv_cache_dir is None
    return config.guesses and device.target.type == "cpu" and place.expert_replicas == 1 and at_once


def state_layers(modules: Iterable[nn.Module]) -> list[StateLayer]:
    return [module for module in modules if isinstance(module, StateLayer)]


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
