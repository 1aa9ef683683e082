"""Groups of attention layers, which share the memory of the KV cache block by block, and their places there.

Layers with a window read the last positions only, so that a sequence needs fewer blocks for them. The layers
of a group read alike. A block belongs to one group at a time and has room for the largest, so that memory
goes to whichever layers need it. A block has one piece in each of some arrays. The first layer of each group
lies in the first array, the second in the second, and so on; where layers need only a part of a piece, some
lie there side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm, prod

import torch
from torch import Tensor

from models.layers.attention import Attention, CachedAttention
from models.ops.attention_inputs import stored_shape
from worker.capacity import WorkerLimits
from worker.devices.base import Device

_KEYS_AT_ONCE = 64
"""The most keys that a kernel reads at once, from a multiple of their number on: some lie before a window."""
_COST_OF_GROUP = 0.01
"""The part of the memory that must be saved for one more block table, which each step has to lay out."""
_MOST_GROUPS = 16
_BITS, _NO_CODE = 32, 1 << 62  # a kind is told as one number: no layer's block has so many numbers

Kind = tuple[int, int]
"""The window of a layer, 0 for none, and the numbers in a block of it: layers of a group have the same."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    window: int
    """The positions that kernels read for a query, as `WorkerFacts.windows` has them."""
    layers: list[CachedAttention]
    share: int = 1
    """The blocks of a layer that have room in a piece; there are as many layers side by side."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: list[LayerGroup]
    block_size: int
    dtype: torch.dtype

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def shares(self) -> list[int]:
        return [group.share for group in self.groups]

    @property
    def block_bytes(self) -> int:
        """The bytes of a block in all arrays."""
        if len(self.groups) == 1:
            return sum(map(self._numbers, self.groups[0].layers)) * self.dtype.itemsize
        return self._arrays * self._piece * self.dtype.itemsize

    def bind(self, blocks: int, device: Device) -> list[Tensor]:
        """Take the memory, without touching it, and give each layer its part.

        Returns contiguous parts [blocks, ...] of all of it: of a plain layer the keys, then the values.
        """
        if not self.block_bytes:
            return []
        # Layers that lie side by side begin in the first piece, and end that far behind the last one.
        beside = self._piece * self.dtype.itemsize if len(self.groups) > 1 else 0
        memory = device.allocate(blocks * self.block_bytes + beside).view(self.dtype)
        if len(self.groups) > 1:
            return self._bind_groups(blocks, memory)
        parts: list[Tensor] = []
        start = 0
        for layer in self.groups[0].layers:
            start = _bind_layer(layer, memory, start, self._shape(layer, blocks))
            parts += layer.cache_parts()
        return parts

    def _bind_groups(self, blocks: int, memory: Tensor) -> list[Tensor]:
        for number, group in enumerate(self.groups):
            for index, layer in enumerate(group.layers):
                array, place = divmod(index, group.share)
                layer.group = number
                shape = self._shape(layer, blocks * group.share)
                beside = place * self._numbers(layer) // 2  # keys of a block, or values
                _bind_layer(layer, memory, array * blocks * self._piece + beside, shape)
        return list(memory[: blocks * self._arrays * self._piece].view(2 * self._arrays, blocks, -1))

    @property
    def _piece(self) -> int:
        """The numbers of a block in one array."""
        return lcm(*(self._numbers(group.layers[0]) for group in self.groups if group.layers))

    @property
    def _arrays(self) -> int:
        return max(-(-len(group.layers) // group.share) for group in self.groups)

    def _numbers(self, layer: CachedAttention) -> int:
        return prod(self._shape(layer, 1))

    def _shape(self, layer: CachedAttention, blocks: int) -> tuple[int, ...]:
        return stored_shape(layer.cache_shape(blocks, self.block_size), self.dtype)


def lay_out_cache(
    layers: Sequence[CachedAttention],
    limits: WorkerLimits,
    dtype: torch.dtype,
    minimum: Callable[[int], int],
    *,
    keeps_all: bool,
) -> CacheLayout:
    """Divide layers into groups: of each kind as many on all ranks (`minimum`), which have other layers.

    `keeps_all`: the blocks of all positions are kept, so that there is one group. So it is, too, where groups
    would save nothing.
    """
    whole = CacheLayout([LayerGroup(0, list(layers))], limits.block_size, dtype)
    if -minimum(-(keeps_all or not all(isinstance(layer, Attention) for layer in layers))):
        return whole
    kinds = _kinds_of(layers, limits, dtype)
    numbers, saves = _choose_numbers(kinds, limits.max_model_len)
    if not -minimum(-saves):
        return whole
    agreed = _agree(numbers, minimum)
    piece = lcm(*(size for _, size in kinds))
    groups = [
        LayerGroup(kind[0], kinds.get(kind, [])[first::number], max(1, piece // kind[1]))
        for kind, number in agreed.items()
        for first in range(number)
    ]
    return CacheLayout(groups, limits.block_size, dtype)


def _kinds_of(
    layers: Sequence[CachedAttention], limits: WorkerLimits, dtype: torch.dtype
) -> dict[Kind, list[CachedAttention]]:
    kinds: dict[Kind, list[CachedAttention]] = {}
    for layer in layers:
        window = layer.window if isinstance(layer, Attention) else None
        read = 0 if window is None else window + _KEYS_AT_ONCE - 1
        numbers = prod(stored_shape(layer.cache_shape(1, limits.block_size), dtype))
        kind = read if read < limits.max_model_len else 0, numbers
        kinds.setdefault(kind, []).append(layer)
    return kinds


def _choose_numbers(kinds: dict[Kind, list[CachedAttention]], longest: int) -> tuple[dict[Kind, int], bool]:
    """The groups of each kind for which the longest sequence needs least; whether they save memory.

    With fewer arrays, less of them is left empty by groups that do not fill them, and there are more groups.
    """
    piece = lcm(*(size for _, size in kinds))
    most = max((-(-len(layers) * size // piece) for (_, size), layers in kinds.items()), default=0)
    needed = sum(len(layers) * size * longest for (_, size), layers in kinds.items())
    best: tuple[float, dict[Kind, int]] = needed, {}
    for arrays in range(most, 0, -1):
        numbers = {kind: -(-len(layers) * kind[1] // (arrays * piece)) for kind, layers in kinds.items()}
        count = sum(numbers.values())
        held = sum(number * (window or longest) for (window, _), number in numbers.items())
        cost = arrays * piece * held * (1 + _COST_OF_GROUP * count)
        if not best[1] or (cost < best[0] and count <= _MOST_GROUPS):
            best = cost, numbers
    return best[1], best[0] < needed


def _agree(numbers: dict[Kind, int], minimum: Callable[[int], int]) -> dict[Kind, int]:
    """The kinds of all ranks in order, and the largest number of groups that a rank has chosen for each."""
    codes = {(window << _BITS) + size: number for (window, size), number in numbers.items()}
    agreed: dict[Kind, int] = {}
    last = -1
    while (code := minimum(min((each for each in codes if each > last), default=_NO_CODE))) < _NO_CODE:
        agreed[divmod(code, 1 << _BITS)] = -minimum(-codes.get(code, 1))
        last = code
    return agreed


def _bind_layer(layer: CachedAttention, memory: Tensor, start: int, shape: tuple[int, ...]) -> int:
    """Give a layer its part, which begins at `start`; returns where it ends."""
    stop = start + prod(shape)
    layer.kv = memory[start:stop].view(shape)
    return stop
