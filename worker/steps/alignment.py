"""Compares texts with their sources, token by token, once all of their tokens are computed.

What layers give out of a text is kept while it is read, in one step or several.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.model import ServedModel
from models.pooling.alignment import AlignedText, Alignment
from worker.pooling import PooledRow, PooledVectors
from worker.sources import find_alignment
from worker.steps.batch import Batch
from worker.tables.slots import Slots


class Aligner:
    def __init__(self, alignment: Alignment, slots: Slots) -> None:
        self._alignment, self._slots = alignment, slots
        self._kept: dict[int, list[Sequence[Tensor]]] = {}
        """The queries of each step, layer by layer, of slots whose texts are not complete."""

    def finish(self, batch: Batch, pooled: PooledVectors) -> None:
        """Keep what a step has given out, and add the matrices of the texts that it completes."""
        if batch.queries is None:
            return
        at = 0
        for row, seq in enumerate(batch.step.seqs):
            if seq.slot in self._slots.aligned:
                kept = self._kept.pop(seq.slot, []) if seq.start else []
                kept.append([each[at : at + seq.count] for each in batch.queries])
                if seq.pools:
                    pooled.rows.append(PooledRow(row))
                    pooled.vectors.append(self._compare(seq.slot, kept, seq.start + seq.count))
                else:
                    self._kept[seq.slot] = kept
            at += seq.count

    def _compare(self, slot: int, kept: Sequence[Sequence[Tensor]], tokens: int) -> Tensor:
        params, sources = self._slots.pooling[slot], self._slots.sources
        if params is None or sources is None:
            raise ValueError(f"slot {slot} has no text that is compared with its source")
        blocks, length = sources.blocks_of(slot)
        queries = [torch.cat(each) for each in zip(*kept, strict=True)]
        table = torch.tensor(blocks, device=self._slots.words.device)
        text = AlignedText(queries, tokens, table, length, params.columns or length)
        return self._alignment(text)[params.skip :]


def open_aligner(model: ServedModel, slots: Slots) -> Aligner | None:
    """What compares texts with their sources; None if the model has no heads for it."""
    alignment = find_alignment(model)
    return None if alignment is None else Aligner(alignment, slots)
