"""The sources of slots: in which blocks their keys and values lie, and how many positions they have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from models.context import ForwardContext
from worker.protocol import NewSeq
from worker.tables.positions import Columns
from worker.tables.staging import Packet


class SourceTable:
    """It lies on the host: a step brings the rows that it reads along."""

    def __init__(self, slots: int, longest: int, block_size: int, scratch: int) -> None:
        """`longest`: the most positions of a source. `scratch`: the block of slots without one."""
        self.width = -(-longest // block_size)
        """The blocks of the longest source."""
        self._block_size, self._scratch = block_size, scratch
        self._blocks = np.full((slots, self.width), scratch, np.int32)
        self._lengths = np.ones(slots, np.int32)

    def admit(self, new: NewSeq) -> None:
        count = len(new.source_blocks)
        if count != -(-new.source_len // self._block_size) or count > self.width:
            raise ValueError(f"a source of {new.source_len} positions has {count} blocks, of {self.width}")
        if count and not 0 <= min(new.source_blocks) <= max(new.source_blocks) < self._scratch:
            raise ValueError(f"a source names a block beyond the {self._scratch} there are")
        self._blocks[new.slot, :count] = new.source_blocks
        self._blocks[new.slot, count or 1 :] = self._scratch
        self._lengths[new.slot] = max(1, new.source_len)

    def blocks_of(self, slot: int) -> tuple[list[int], int]:
        """The blocks of a slot's source, and its positions."""
        length = int(self._lengths[slot])
        return self._blocks[slot, : -(-length // self._block_size)].tolist(), length

    def stage(
        self, columns: Columns, packet: Packet, queries: list[Tensor] | None
    ) -> Callable[[ForwardContext], None]:
        """Send what a step reads; the returned function shows it to a model, once it is there.

        `queries`: gets those that layers give out, if some are asked for.
        """
        held = self._lengths[columns.slots]
        width = -(-int(held.max()) // self._block_size)
        lengths, last = packet.ints(held), packet.ints(np.repeat(held - 1, columns.counts))
        table = packet.ints(self._blocks[columns.slots, :width].ravel()).view(-1, width)

        def show(context: ForwardContext) -> None:
            if (known := context.source) is not None:  # recordings of small steps read it there
                known.kv_lens.copy_(lengths)
                known.kv_lens_host = held.tolist()  # for what no kernel computes
                known.block_table[:, :width] = table
                if known.last is not None:
                    known.last.copy_(last)
                known.queries = queries
                return
            context.source = ForwardContext(
                positions=context.positions,
                query_starts=context.query_starts,
                kv_lens=lengths,
                block_table=table,
                slot_mapping=context.slot_mapping,
                block_size=self._block_size,
                query_lens_host=columns.counts,
                kv_lens_host=held.tolist(),
                last=last,
                queries=queries,
            )

        return show
