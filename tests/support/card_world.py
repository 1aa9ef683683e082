"""A cache on a card, blocks of which leave and come back while steps write and read them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from lanes import Card

from worker.disk.block_read import BlockRead
from worker.disk.disk import Disk


class World:
    """A cache on a card, and what each of its blocks should hold."""

    def __init__(self, seed: int, blocks: int, widths: Sequence[int]) -> None:
        """`widths`: the bytes of a block in each part of the cache."""
        self.random, self.card = random.Random(seed), Card(seed)
        self.steps = self.card.lane()
        self.parts = [torch.zeros(blocks, width, dtype=torch.uint8) for width in widths]
        self.holds = [0] * blocks
        self.lanes = self.steps, self.card.lane()
        self.reads: list[BlockRead] = []
        self.wrong: list[str] = []
        self.count = 0

    @staticmethod
    def name(value: int) -> bytes:
        """The name of a block that holds this."""
        return b"value %d" % value

    @property
    def idle(self) -> list[int]:
        coming = {block for read in self.reads for block in read.blocks}
        return [block for block in range(len(self.holds)) if block not in coming]

    def overwrite(self, block: int) -> None:
        """Have a step write to a block."""
        self.count += 1
        self.holds[block] = value = self.count % 256
        self.steps.run(lambda: [part[block].fill_(value) for part in self.parts])

    def look(self) -> None:
        """Have a step read all blocks that nothing is brought to."""
        expected = {block: self.holds[block] for block in self.idle}

        def compare() -> None:
            for block, value in expected.items():
                if not all(bool((part[block] == value).all()) for part in self.parts):
                    self.wrong.append(f"block {block} does not hold {value}")

        self.steps.run(compare)

    def end(self, store: Disk, read: BlockRead) -> None:
        """Use what has come of a read."""
        self.reads.remove(read)
        store.end(read, 1.0)
        for name, block, loaded in zip(read.names, read.blocks, read.loaded, strict=True):
            if loaded:
                self.holds[block] = int(name.split()[1])
            else:
                self.overwrite(block)

    def wait(self, read: BlockRead) -> None:
        """Wait until a read is done."""
        with self.card.hurrying():
            assert read.done.wait(10)
