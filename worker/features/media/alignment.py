"""Compares texts with their sources, token by token, once all of their tokens are computed.

What layers give out of a text is kept while it is read, in one step or several.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.pooling.alignment import AlignedText, Alignment
from worker.features.media.source_table import SourceTable
from worker.protocol import NewSeq, Pooling
from worker.steps.batch import Batch, Outcome, PooledRow, PooledVectors
from worker.tables.slots import Slots


class Aligner:
    def __init__(self, alignment: Alignment, slots: Slots, sources: SourceTable) -> None:
        self._alignment, self._slots, self._sources = alignment, slots, sources
        self._aligned: set[int] = set()
        """Slots whose sequences are compared with their sources, token by token."""
        self._queries: list[Tensor] | None = None
        """What layers of cross-attention give out of the step that is computed; None: they are not to."""
        self._kept: dict[int, list[Sequence[Tensor]]] = {}
        """The queries of each step, layer by layer, of slots whose texts are not complete."""

    def admit(self, new: NewSeq) -> None:
        """Note whether a sequence is compared with its source."""
        aligned = isinstance(new.params, Pooling) and new.params.task == "align"
        (self._aligned.add if aligned else self._aligned.discard)(new.slot)

    def open_queries(self, held: Sequence[int]) -> list[Tensor] | None:
        """Return the list to which layers of the next step, of these slots, are to add their queries."""
        self._queries = None if self._aligned.isdisjoint(held) else []
        return self._queries

    def keep(self, batch: Batch) -> None:
        """Keep the queries that layers have given out in a step, for each text that is compared."""
        at = 0
        for seq in batch.step.seqs if self._queries else ():
            if seq.slot in self._aligned:
                kept = self._kept.pop(seq.slot, []) if seq.start else []
                self._kept[seq.slot] = [*kept, [each[at : at + seq.count] for each in self._queries or ()]]
            at += seq.count

    def finish(self, batch: Batch, outcome: Outcome, pooled: PooledVectors) -> None:
        """Add the matrices of the texts that a step completes."""
        for row, seq in enumerate(batch.step.seqs):
            if seq.pools and seq.slot in self._aligned:
                pooled.rows.append(PooledRow(row))
                kept = self._kept.pop(seq.slot)
                pooled.vectors.append(self._compare(seq.slot, kept, seq.start + seq.count))

    def _compare(self, slot: int, kept: Sequence[Sequence[Tensor]], tokens: int) -> Tensor:
        params = self._slots.pooling[slot]
        if params is None:
            raise ValueError(f"slot {slot} has no text that is compared with its source")
        blocks, length = self._sources.blocks_of(slot)
        queries = [torch.cat(each) for each in zip(*kept, strict=True)]
        table = torch.tensor(blocks, device=self._slots.words.device)
        text = AlignedText(queries, tokens, table, length, params.columns or length)
        return self._alignment(text)[params.skip :]
