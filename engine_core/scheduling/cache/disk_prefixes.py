"""Prefixes on disk or in the host's memory: when blocks are written there, and who waits for them.

Published blocks are written once: at once while nothing runs, slowly beside steps. They are copied before,
so that the pool may take them for something else. Memory gets those alone that are about to be forgotten. A
sequence whose turn has come waits until blocks of its prefix are back, if that is expected to take less time
than computing them; others go on meanwhile. Blocks that came back are published like any other, so that all
that follows is a prefix in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_core.scheduling.cache.cache_manager import CacheManager, Find
from engine_core.scheduling.cache.disk_encodings import Arrival, DiskEncodings
from engine_core.scheduling.media import MediaItems
from engine_core.scheduling.queue.waiting import WaitingQueue
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_cost import CostLine
from worker.disk.block_read import BlockRead
from worker.disk.disk import Disk
from worker.protocol import DiskTotals

_PART_OF_TIME = 0.02
"""The part of the time beside steps that writing may take."""
_AT_ONCE = 4 << 20
"""The most bytes that are written at once beside steps, if these are several blocks."""
_PATIENCE = 1.0
"""The seconds for which blocks are awaited at least, though computing them would take less."""
_STEPS_AHEAD = 4
"""How many times as many blocks as are saved at once count as those that are about to be forgotten."""


@dataclass(slots=True)
class _Return:
    """A prefix whose blocks are being brought back for a sequence."""

    seq: Sequence
    read: BlockRead
    blocks: list[int]
    """All blocks of the prefix in order, which nobody can take meanwhile."""
    until: float
    state: BlockRead | None = None
    """The read of the state behind the prefix, if that is on disk, too."""
    items: list[Arrival] = field(default_factory=list[Arrival])
    """The media items behind the prefix whose encodings are being brought back, too."""
    is_void: bool = False

    @property
    def is_done(self) -> bool:
        is_there = self.read.done.is_set() and (self.state is None or self.state.done.is_set())
        return is_there and all(item.is_done for item in self.items)

    def wait(self, disk: Disk, now: float) -> None:
        items = [item.read for item in self.items if not item.is_done]
        for read in (self.read, *([self.state] if self.state else ()), *items):
            disk.wait_for(read, self.until - now)


class DiskPrefixes:
    def __init__(
        self, disk: Disk, cache: CacheManager, waiting: WaitingQueue, line: CostLine, media: MediaItems
    ) -> None:
        self._disk = disk
        self._cache = cache
        self._waiting = waiting
        self._line = line
        self._unwritten: dict[bytes, None] = {}
        """Names of published blocks, the oldest first; some of them may be taken since."""
        self._returns: list[_Return] = []
        self._written = 0.0
        """When blocks were handed over last."""
        self._unwritten_states: dict[bytes, None] = {}
        self._encodings = None if disk.encodings is None else DiskEncodings(disk.encodings, media, line)
        others = (disk.states, disk.encodings)
        self._disks = [disk, *[other for other in others if other is not None]]
        if disk.room is None:
            cache.published = self._unwritten
            if cache.states is not None:
                cache.states.published = self._unwritten_states

    @property
    def totals(self) -> tuple[DiskTotals | None, DiskTotals | None]:
        """What became of blocks in files, and in the host's memory."""
        totals = self._disk.totals
        return (totals, None) if self._disk.room is None else (None, totals)

    @property
    def is_reading(self) -> bool:
        """Whether blocks are being brought back, and no read is done."""
        return bool(self._returns) and not any(each.is_done for each in self._returns)

    @property
    def next_deadline(self) -> float | None:
        """The time by which `land` must be called, though no read is done."""
        return min([each.until for each in self._returns], default=None)

    def fetch(self, seq: Sequence, now: float) -> bool:
        """Have blocks and encodings brought back for a waiting sequence, once -> whether it waits for them
        now."""
        if seq.was_fetched:
            return False
        seq.was_fetched = True
        for disk in self._disks:
            disk.look()
        found, end = self._fetch_blocks(seq, now)
        if self._encodings is not None and seq.request.media:
            items, computing = self._encodings.fetch(seq, end)
            if items:
                found = found or _Return(seq, BlockRead((), ()), [], now)
                found.items, found.until = items, max(found.until, now + max(_PATIENCE, computing))
        if found is None:
            return False
        self._waiting.remove(seq)
        seq.is_fetching = True
        self._returns.append(found)
        return True

    def _fetch_blocks(self, seq: Sequence, now: float) -> tuple[_Return | None, int]:
        """Have blocks read for a sequence, if that is of use -> and the tokens of its prefix that are cached
        then."""
        count, prefix = self._cache.prefix_with(seq, self._disk, self._disk.states or ())
        names = [name for name, block in prefix if block is None]
        held = [block for _, block in prefix if block is not None]
        state = self._missing_state(seq, count)
        start = self._cache.cached_tokens(seq)
        if not (names or state) or not self._cache.fits(seq):
            return None, start
        pool = self._cache.pool
        if len(names) + sum(not pool.users(block) for block in held) > pool.free:
            return None, start
        computing, reading = self._computing(start, count), self._disk.pace.expected(len(names))
        if state is not None and self._disk.states is not None:
            reading += self._disk.states.pace.expected(1)
        if reading > computing:
            self._disk.pace.doubt()
            return None, start
        pool.share(held)
        taken = pool.take(len(names))
        read, rest = BlockRead(names, taken), iter(taken)
        blocks = [next(rest) if block is None else block for _, block in prefix]
        behind = self._read_state(state)
        self._disk.read(read)
        found = _Return(seq, read, blocks, now + max(_PATIENCE, computing), behind)
        return found, count * self._cache.block_size

    def _missing_state(self, seq: Sequence, blocks: int) -> bytes | None:
        """The name of the state behind so many blocks of a prefix, if it is on disk only."""
        if self._cache.states is None or not blocks:
            return None
        name = seq.block_hash(blocks - 1, self._cache.block_size)
        return name if self._cache.states.find(name) is None else None

    def _read_state(self, name: bytes | None) -> BlockRead | None:
        """Have a state brought back, if there is one and a place for it."""
        if name is None or self._cache.states is None or self._disk.states is None:
            return None
        if (place := self._cache.states.take()) is None:
            return None
        read = BlockRead([name], [place])
        self._disk.states.read(read)
        return read

    def _land_state(self, read: BlockRead, now: float, *, is_void: bool) -> None:
        if self._cache.states is not None and self._disk.states is not None:
            self._disk.states.end(read, now)
            self._cache.states.put(read.names[0], read.blocks[0], is_filled=read.loaded[0] and not is_void)

    def _computing(self, start: int, blocks: int) -> float:
        """The seconds in which the tokens of these blocks from `start` on would be computed."""
        count = max(0, blocks * self._cache.block_size - start)
        return self._line.tokens(count, count * start + count * count // 2)

    def land(self, now: float) -> None:
        """Publish blocks that are back, and let sequences go on whose reads are done, or take too long.

        What the next steps may take is saved first, if there is memory for it.
        """
        if self._disk.room is not None:
            self._save_leaving()
        for each in [each for each in self._returns if each.is_done or now >= each.until]:
            self._returns.remove(each)
            if each.read.names:
                self._disk.end(each.read, now)
            for item in each.items:
                item.end(now)
            if each.state is not None:
                self._land_state(each.state, now, is_void=each.is_void)
            for name, block, loaded in zip(each.read.names, each.read.blocks, each.read.loaded, strict=True):
                if loaded and not each.is_void:
                    self._cache.pool.publish(block, name)
            self._cache.pool.release(each.blocks)
            each.seq.is_fetching = False
            if not (each.seq.done or each.seq.paused):
                self._waiting.add(each.seq)

    def follow(self, now: float, *, steps: bool, wait: bool) -> None:
        """Have blocks written beside `steps`; without any, `wait` for a read."""
        if steps and self._disk.room is None:
            self.write(now, idle=False)
        elif wait and self._returns:
            self._returns[0].wait(self._disk, now)

    def write(self, now: float, *, idle: bool) -> bool:
        """Have some encodings written, or else published blocks, or else states, if it is time -> whether any
        were."""
        if self._disk.room is not None:
            return self._save_leaving()
        for queue in (self._unwritten, self._unwritten_states):
            while len(queue) > 2 * self._cache.pool.count:  # the disk does not keep up
                del queue[next(iter(queue))]
        encoded = {} if self._encodings is None else self._encodings.unwritten
        if not (self._unwritten or self._unwritten_states or encoded):
            return False
        due = self._written + max(disk.write_seconds for disk in self._disks) / _PART_OF_TIME
        if not idle and now < due:
            return False
        wrote, states = False, self._cache.states
        if self._encodings is not None:  # a page took longer than its blocks, in fewer bytes
            wrote = self._write_to(self._encodings.disk, [encoded], self._encodings.find, idle=idle)
        wrote = wrote or self._write_to(self._disk, [self._unwritten], self._cache.pool.find, idle=idle)
        if not wrote and states is not None and self._disk.states is not None:
            wrote = self._write_to(self._disk.states, [self._unwritten_states], states.find, idle=idle)
        if wrote:
            self._written = now
        return wrote

    def _save_leaving(self) -> bool:
        """Have blocks and states saved that are about to be forgotten -> whether any were."""
        wrote = False
        for disk, cached in ((self._disk, self._cache.pool), (self._disk.states, self._cache.states)):
            if disk is not None and cached is not None and disk.room is not None and disk.may_write:
                names = cached.leaving(min(disk.room, _STEPS_AHEAD * disk.most))
                queue = dict.fromkeys(name for name in names if name not in disk)
                wrote |= self._write_to(disk, [queue], cached.find, idle=True)
        return wrote

    def _write_to(self, disk: Disk, queues: Iterable[dict[bytes, None]], find: Find, *, idle: bool) -> bool:
        """Have what is found of these names written, the first ones first -> whether there was anything."""
        if not disk.may_write:
            return False
        most = disk.most if idle else min(disk.most, max(1, _AT_ONCE // disk.block_bytes))
        names: list[bytes] = []
        blocks: list[int] = []
        for queue in queues:
            while queue and len(names) < most:
                name = next(iter(queue))
                del queue[name]
                block = find(name)
                if block is not None and name not in disk:
                    names.append(name)
                    blocks.append(block)
        if names:
            disk.write(names, blocks)
        return bool(names)

    def _rest(self, seconds: float) -> bool:
        """Wait until nothing is being written -> whether that is so."""
        return all(disk.rest(seconds) for disk in self._disks)

    def write_rest(self, now: float, until: float) -> bool:
        """Have the next blocks written behind those that are, and wait for these -> whether some are left."""
        if self._disk.room is not None:  # memory ends with the engine
            return False
        return self._rest(max(0.0, until - now)) and self.write(now, idle=True)

    def forget(self) -> None:
        """Forget all that is on disk, and what is on its way from there or to it."""
        self._unwritten.clear()
        self._unwritten_states.clear()
        for each in self._returns:
            each.is_void, each.until = True, 0.0
        if self._encodings is not None:
            self._encodings.forget()
        for disk in self._disks:
            disk.forget_all()
