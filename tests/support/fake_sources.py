"""Sources for tests of the engine, and what a worker without tensors makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from engine_core.protocol import Source
from worker.buffers import Buffer
from worker.protocol import NewSeq, StepInput


def source(name: str, length: int = 10) -> Source:
    return Source(name, length, features=Buffer(name.encode().ljust(6)))


def number_of(source: Source, block_size: int) -> int:
    """What is added to each token of an answer to a source."""
    blocks = range(-(-source.length // block_size))
    features = bytes(source.features.data) if source.features else b""
    return sum(_entry(features, source.length, index) for index in blocks)


class FakeSources:
    """What was written to each block of sources, of which every row of a slot reads its own."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._slots: dict[int, Sequence[int]] = {}
        self.encoded = 0

    def follow(self, step: StepInput) -> None:
        for each in step.sources:
            features = bytes(each.features.data) if each.features else b""
            for index, block in enumerate(each.blocks):
                self._blocks[block] = _entry(features, each.length, index)
            self.encoded += 1

    def begin(self, new: NewSeq) -> None:
        self._slots[new.slot] = new.source_blocks

    def read(self, slot: int) -> int:
        return sum(self._blocks[block] for block in self._slots.get(slot, ()))


def _entry(features: bytes, length: int, index: int) -> int:
    return crc32(features + bytes([length, index])) % 49999
