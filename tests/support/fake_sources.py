"""Sources for tests of the engine, and what a worker without tensors makes of them."""

from collections.abc import Sequence
from zlib import crc32

from engine_core.protocol import Source
from worker.buffers import Buffer
from worker.protocol import EncodeSource, NewSeq, StepInput


def source(name: str, length: int = 10) -> Source:
    return Source(name, length, features=Buffer(name.encode().ljust(6)))


def number_of(source: Source, block_size: int) -> int:
    """What is added to each token of an answer to a source."""
    blocks = range(-(-source.length // block_size))
    features = bytes(source.features.data) if source.features else b""
    return sum(_entry(features, source.length, index) for index in blocks)


class FakeSources:
    """What was written to each block of sources, of which every row of a slot reads its own."""

    def __init__(self, layers: int = 0) -> None:
        self._layers = layers
        self._begun: tuple[EncodeSource, int] | None = None
        """The source of which some layers were computed, and how many are left."""
        self._blocks: dict[int, int] = {}
        self._slots: dict[int, Sequence[int]] = {}
        self.encoded = 0

    def follow(self, step: StepInput) -> None:
        self._begun = None if step.fresh else self._begun
        for each in step.sources:
            if each.partly:
                self._begun = each, self._layers
            else:
                self._write(each)
        if step.source_layers:
            assert self._begun is not None, "layers of a source that nobody has begun"
            source, left = self._begun
            assert 0 < step.source_layers <= left
            self._begun = source, left - step.source_layers
            if not self._begun[1]:
                self._write(source)
                self._begun = None

    def _write(self, source: EncodeSource) -> None:
        features = bytes(source.features.data) if source.features else b""
        for index, block in enumerate(source.blocks):
            self._blocks[block] = _entry(features, source.length, index)
        self.encoded += 1

    def begin(self, new: NewSeq) -> None:
        self._slots[new.slot] = new.source_blocks

    def read(self, slot: int) -> int:
        return sum(self._blocks[block] for block in self._slots.get(slot, ()))


def _entry(features: bytes, length: int, index: int) -> int:
    return crc32(features + bytes([length, index])) % 49999
