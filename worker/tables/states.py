"""What steps of single tokens must know of each slot, in a table on the device.

A step that a device has recorded reads lengths and options here and counts on by itself, so that it is told
of nothing but its slots. Every other step writes the rows of its own sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worker.protocol import SeqStep
from worker.tables.random_bits import stream
from worker.tables.slots import STATE_WORDS, Slots

LENGTH, INDEX, TOP_K, TEMPERATURE, TOP_P, MIN_P, STREAM = range(7)
"""The words of a row. Temperature, top_p and min_p are bits of float32; the stream of points has 64 bits."""


class States:
    def __init__(self, slots: Slots) -> None:
        rows = slots.count + 1
        self.table = slots.states
        self._slots = slots
        self._lengths, self._indices = np.full((2, rows), -1, np.int64)
        """The lengths and counts of output tokens that the table has; -1 where that is not known."""

    def after(self, seqs: Sequence[SeqStep]) -> tuple[np.ndarray, np.ndarray]:
        """Note what holds after a step: places in the memory of all tables, and the words to write there."""
        slots, held = self._slots, np.array([seq.slot for seq in seqs], np.int64)
        self._lengths[held] = [seq.start + seq.count for seq in seqs]
        self._indices[held] = [seq.output_index + seq.samples for seq in seqs]
        words = np.empty((len(held), STATE_WORDS), np.int32)
        words[:, LENGTH], words[:, INDEX] = self._lengths[held], self._indices[held]
        words[:, TOP_K] = slots.top_k[held]
        for word, values in ((TEMPERATURE, slots.temperature), (TOP_P, slots.top_p), (MIN_P, slots.min_p)):
            words[:, word] = values[held].view(np.int32)
        words[:, STREAM:] = stream(slots.seed[held]).view(np.int32).reshape(-1, 2)
        flat = held[:, None] * STATE_WORDS + np.arange(STATE_WORDS)
        return flat.reshape(-1), words.reshape(-1)

    def knows(self, seqs: Sequence[SeqStep]) -> bool:
        """Whether the table has the lengths and counts with which a step begins."""
        held = [seq.slot for seq in seqs]
        starts, indices = [seq.start for seq in seqs], [seq.output_index for seq in seqs]
        return bool((self._lengths[held] == starts).all() and (self._indices[held] == indices).all())

    def advance(self, held: Sequence[int]) -> None:
        """Note that a recorded step counts on by itself in these slots."""
        self._lengths[held] += 1
        self._indices[held] += 1

    def forget(self) -> None:
        """Believe nothing of the table any more: a step has failed, and may have counted on or not."""
        self._lengths.fill(-1)
