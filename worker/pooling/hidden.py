"""Hidden states of all positions that are computed, in pages beside the KV cache: same blocks, same places.

A prompt that was read in chunks, or whose beginning was found in the cache, computes only its last positions
in its last step. What pools needs all of them; here are the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models.context import ForwardContext


class HiddenStore:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        allocate: Callable[[int], Tensor],
    ) -> None:
        """`num_blocks`: the engine's, without the scratch block that comes after them.

        `allocate`: gives so many bytes of the device's memory.
        """
        places = (num_blocks + 1) * block_size
        self._block_size = block_size
        self._rows = allocate(places * width * dtype.itemsize).view(dtype).view(places, width)

    @staticmethod
    def block_bytes(block_size: int, width: int, dtype: torch.dtype) -> int:
        return block_size * width * dtype.itemsize

    def write(self, hidden: Tensor, context: ForwardContext) -> None:
        """What the step gave for its tokens [T, width]."""
        self._rows[context.slot_mapping] = hidden.to(self._rows.dtype)

    def read(self, block_table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Of positions [N] of the sequences in these rows of the table [N] -> [N, width]."""
        blocks = block_table[slots, positions // self._block_size].long()  # [N]
        return self._rows[blocks * self._block_size + positions % self._block_size]
