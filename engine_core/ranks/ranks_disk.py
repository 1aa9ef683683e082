"""The blocks that all ranks of an engine keep on disk, each the part that it computes, in files of its own.

A block is there if all ranks have it, and back when all have read it. Ranks tell what has changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from engine_core.executor import ExecutorDead
from worker.cache_tiers.block_read import BlockRead, ReadPace
from worker.protocol import DiskTotals
from worker.ranks.channel import DiskKind, DiskNews, DiskOrder, DiskTask

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _RanksRead:
    """A read that all ranks do."""

    read: BlockRead
    counts: list[int]
    """The number of ranks that have each of its blocks."""
    done: set[int] = field(default_factory=set[int])
    """The ranks that bring no more."""


class RanksDisk:
    """An engine's `Disk`, which orders ranks what to write and read."""

    def __init__(
        self,
        send: Callable[[DiskOrder], None],
        receive: Callable[[int], None],
        ranks: int,
        kind: DiskKind = "blocks",
    ) -> None:
        """`receive`: a function that waits so many milliseconds for messages, which `hear` is told."""
        self._send, self._receive, self._ranks = send, receive, ranks
        self._kind: DiskKind = kind
        self._states = RanksDisk(send, receive, ranks, "states") if kind == "blocks" else None
        self._news: dict[int, DiskNews] = {}
        """The last news of each rank."""
        self._names: dict[int, set[bytes]] = {}
        self._reads: dict[int, _RanksRead] = {}
        self._count = self._writes = 0
        self._next_write = 0.0
        self.pace = ReadPace()

    def opened(self) -> RanksDisk | None:
        """Return this, if all ranks keep blocks, and all of them states or none."""
        counts = {len(self._news), self._ranks if self.states is None else len(self.states._news)}
        if counts == {self._ranks}:
            return self
        if self._news:
            _log.warning("--kv-cache-dir: nothing is kept on disk, because some ranks have nothing to keep")
        return None

    @property
    def states(self) -> RanksDisk | None:
        """The disk of states, if ranks keep some behind blocks."""
        return self._states if self._states is not None and self._states._news else None

    def hear(self, rank: int, news: DiskNews) -> None:
        """Take in what a rank tells."""
        if news.kind != self._kind:
            if self._states is not None:
                self._states.hear(rank, news)
            return
        self._news[rank] = news
        names = self._names.setdefault(rank, set())
        names.difference_update(news.lost)
        names.update(news.found)
        if news.pause:
            self._next_write = time.monotonic() + news.pause
        for number, places in news.loaded.items():
            if (own := self._reads.get(number)) is not None:
                for place in places:
                    own.counts[place] += 1
                    own.read.loaded[place] = own.counts[place] == self._ranks
        for number in news.done:
            if (own := self._reads.get(number)) is not None:
                own.done.add(rank)
                if len(own.done) == self._ranks:
                    own.read.done.set()

    def __contains__(self, name: bytes) -> bool:
        return all(name in names for names in self._names.values())

    @property
    def block_bytes(self) -> int:
        return max(news.block_bytes for news in self._news.values())

    @property
    def most(self) -> int:
        return min(news.most for news in self._news.values())

    @property
    def room(self) -> int | None:
        """The most blocks that all ranks hold, if they have memory for them."""
        return min((news.room for news in self._news.values() if news.room is not None), default=None)

    @property
    def write_seconds(self) -> float:
        return max(news.write_seconds for news in self._news.values())

    @property
    def totals(self) -> DiskTotals:
        """The totals of blocks that all have, of bytes together, and what lies in a folder."""
        each = [news.totals for news in self._news.values()]
        return DiskTotals(
            *(min(one.written for one in each), sum(one.bytes_written for one in each)),
            *(min(one.read for one in each), sum(one.bytes_read for one in each)),
            *(sum(one.failures for one in each), max(one.held for one in each)),
        )

    @property
    def may_write(self) -> bool:
        """Whether no rank is writing, and writing has not failed on one just now."""
        return self._rests and time.monotonic() >= self._next_write

    def rest(self, seconds: float) -> bool:
        """Wait until no rank is writing -> whether that is so."""
        return self._wait(lambda: self._rests, seconds)

    def write(self, names: list[bytes], blocks: list[int]) -> None:
        """Have these blocks written. Called when it may be."""
        self._writes += 1
        self._order("write", names=names, blocks=blocks)

    def look(self) -> None:
        """Have files of other engines looked for."""
        self._order("look")

    def forget_all(self) -> None:
        """Have all files removed, of all engines with the same identity."""
        self._order("forget")

    def read(self, read: BlockRead) -> None:
        """Have blocks read by all ranks."""
        self._count += 1
        self._reads[self._count] = _RanksRead(read, [0] * len(read.names))
        read.began = time.monotonic()
        self.pace.begin(read)
        self._order("read", self._count, list(read.names), list(read.blocks))

    def end(self, read: BlockRead, now: float) -> None:
        """Give a read up, if it is not done, and learn from it. To be called once for each."""
        number = next(number for number, own in self._reads.items() if own.read is read)
        del self._reads[number]
        self.pace.end(read, now)
        self._order("end", number)

    def wait_for(self, read: BlockRead, seconds: float) -> None:
        """Wait until a read is done, but no longer than so many seconds."""
        self._wait(read.done.is_set, seconds)

    @property
    def _rests(self) -> bool:
        return all(news.written == self._writes for news in self._news.values())

    def _order(
        self,
        task: DiskTask,
        number: int = 0,
        names: list[bytes] | None = None,
        blocks: list[int] | None = None,
    ) -> None:
        self._send(DiskOrder(task, self._kind, number, names or [], blocks or []))

    def _wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Receive messages until something is so, for so many seconds at most -> whether it is."""
        until = time.monotonic() + seconds
        try:
            while not is_so():
                left = until - time.monotonic()
                self._receive(max(0, ceil(1000 * left)))
                if left <= 0:
                    break
        except ExecutorDead:  # who runs steps is told of it
            return False
        return is_so()
