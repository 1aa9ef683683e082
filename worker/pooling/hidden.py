"""The hidden states of all computed positions, in blocks of the same numbers as the KV cache's.

A prompt that was read in chunks, or whose beginning was found in the cache, computes only its last positions
in its last step. Pooling that needs all of them reads the others here.
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
        """`num_blocks`: without the scratch block. `allocate` takes so many bytes of the device's memory."""
        count = (num_blocks + 1) * block_size  # positions
        self._block_size = block_size
        self._rows = allocate(count * width * dtype.itemsize).view(dtype).view(count, width)

    @staticmethod
    def block_bytes(block_size: int, width: int, dtype: torch.dtype) -> int:
        return block_size * width * dtype.itemsize

    def write(self, hidden: Tensor, context: ForwardContext) -> None:
        """Store the hidden states [T, width] of a step."""
        self._rows[context.slot_mapping] = hidden.to(self._rows.dtype)

    def read(self, block_table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """The hidden states [N, width] of these positions [N] of the sequences in these slots [N]."""
        blocks = block_table[slots, positions // self._block_size].long()  # [N]
        return self._rows[blocks * self._block_size + positions % self._block_size]
