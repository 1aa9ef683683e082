"""A cache on a card, blocks of which leave and come back while steps write and read them."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch

from worker.cache_tiers.block_read import BlockRead
from worker.cache_tiers.host_copies import Mark
from worker.cache_tiers.tier import CacheTier


class Card:
    def __init__(self, seed: int) -> None:
        self._random, self._changed = random.Random(seed), threading.Condition()
        self._hurries = False
        self._lanes: list[deque[Callable[[], object] | CardMark | CardWait]] = []

    def lane(self) -> CardLane:
        self._lanes.append(deque())
        return CardLane(self, len(self._lanes) - 1)

    def add(self, lane: int, work: Callable[[], object] | CardMark | CardWait) -> None:
        with self._changed:
            self._lanes[lane].append(work)
            for _ in range(self._random.randrange(3)):
                self._go_on()
            self._changed.notify_all()

    @contextmanager
    def hurrying(self) -> Generator[None]:
        """Let marks be reached that are waited for. Else the card goes on when it gets work alone."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
        yield
        with self._changed:
            self._hurries = False

    def reach(self, mark: CardMark) -> None:
        """Wait until this mark is reached."""
        with self._changed:
            self._changed.wait_for(lambda: mark.is_reached or self._hurries)
            while not mark.is_reached:
                self._go_on()

    def _go_on(self) -> None:
        """Do what stands first in one of the lanes."""
        able = [
            lane
            for lane in self._lanes
            if lane and not (isinstance(head := lane[0], CardWait) and not head.mark.is_reached)
        ]
        if not able:
            return
        match self._random.choice(able).popleft():
            case CardMark() as mark:
                mark.is_reached = True
            case CardWait():
                pass
            case work:
                work()


class CardMark:
    def __init__(self, card: Card) -> None:
        self._card, self.is_reached = card, False

    def synchronize(self) -> None:
        self._card.reach(self)


class CardWait:
    def __init__(self, mark: CardMark) -> None:
        self.mark = mark


class CardLane:
    def __init__(self, card: Card, number: int) -> None:
        self._card, self._number = card, number

    def run(self, work: Callable[[], object]) -> None:
        self._card.add(self._number, work)

    def mark(self) -> CardMark:
        mark = CardMark(self._card)
        self._card.add(self._number, mark)
        return mark

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, CardMark)
        self._card.add(self._number, CardWait(mark))


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

    def end(self, store: CacheTier, read: BlockRead) -> None:
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
