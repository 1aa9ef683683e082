"""A read of some blocks from disk, which threads do block by block, and which can be given up at any time.

Reads show how long others will take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


class BlockRead:
    """Blocks that are brought back into memory, in order; what follows one that is lost is left out."""

    def __init__(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Find blocks on disk by `names`, and write them into these blocks of the cache."""
        self.names, self.blocks = names, blocks
        self.loaded = [False] * len(names)
        """Whether each of them is there. This changes no more once the read is done or given up."""
        self.done = threading.Event()
        """Set when nothing is left to be read."""
        self.began = 0.0
        """When the first block was looked for, on the monotonic clock."""
        if not names:
            self.done.set()
        self._next = self._under_way = 0
        self._end = len(names)
        """The index of the first one that is left out: that is lost, or comes too late."""
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """The index of the next block to read, if there is one."""
        with self._lock:
            if self._next >= self._end:
                return None
            self.began = self.began or time.monotonic()
            self._next += 1
            self._under_way += 1
            return self._next - 1

    def land(self, index: int, bring: Callable[[], None] | None) -> bool:
        """Have a block brought to its place, or note that it is lost (None) -> whether the read is done."""
        with self._lock:
            self._under_way -= 1
            if bring is None:
                self._end = min(self._end, index)
            elif index < self._end:
                bring()
                self.loaded[index] = True
            if not self._under_way and self._next >= self._end:
                self.done.set()
            return self.done.is_set()

    @property
    def is_given_up(self) -> bool:
        """Whether nothing shall be brought any more."""
        return not self._end

    def give_up(self) -> None:
        """Have nothing more brought into its blocks."""
        with self._lock:
            self._end = 0


class ReadPace:
    """The time that blocks take to come back, learned from reads: none, before there was one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The seconds that a block takes."""
        self._queued = 0  # blocks of reads that are not done

    def expected(self, blocks: int) -> float:
        """The seconds in which so many blocks would be here, if all goes as it did lately."""
        return self.seconds * (self._queued + blocks)

    def doubt(self) -> None:
        """Note that reading seemed too slow: after some times it is tried again."""
        self.seconds *= 0.9

    def begin(self, read: BlockRead) -> None:
        """Count a read that others have to wait for."""
        self._queued += len(read.names)

    def end(self, read: BlockRead, now: float) -> int:
        """Give a read up, if it is not done, and learn from it -> the blocks that have come."""
        read.give_up()
        self._queued -= len(read.names)
        loaded = sum(read.loaded)
        if read.began and (loaded or not read.done.is_set()):
            self.seconds = (self.seconds + (now - read.began) / max(1, loaded)) / 2
        return loaded
