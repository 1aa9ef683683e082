"""Prefixes on disk or in the host's memory: when blocks are written there, and who waits for them.

Published blocks are written once: at once while nothing runs, slowly beside steps. They are copied before,
so that the pool may take them for something else. Memory gets those alone that are about to be forgotten. A
sequence whose turn has come waits until blocks of its prefix are back, if that is expected to take less time
than computing them; others go on meanwhile. Blocks that came back are published like any other, so that all
that follows is a prefix in memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from engine_core.engine_stats import Stats
from engine_core.protocol import OutputsByClient
from engine_core.scheduling.cache.cache_manager import Find
from engine_core.scheduling.cache.state_pool import StatePool
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Place, Sequence
from worker.cache_tiers.block_read import BlockRead
from worker.cache_tiers.tier import CacheTier

_MOST_WRITING = 5.0
"""The seconds for which an engine that ends or falls asleep writes prefixes to disk at most."""
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
    is_void: bool = False

    @property
    def is_done(self) -> bool:
        return self.read.done.is_set() and (self.state is None or self.state.done.is_set())

    def wait(self, disk: CacheTier, now: float) -> None:
        for read in (self.read, *([self.state] if self.state else ())):
            disk.wait_for(read, self.until - now)


class StoredPrefixes(Feature):
    def __init__(self, core: Scheduler, disk: CacheTier, states: StatePool | None) -> None:
        """`states`: the states that are remembered in memory, if the model has some."""
        cache = core.cache
        self._disk, self._states = disk, states
        self._cache, self._waiting, self._step_time = cache, core.waiting, core.pace.step_time
        self._looked: set[Sequence] = set()
        """Sequences of whose prefixes blocks were looked for."""
        self._unwritten: dict[bytes, None] = {}
        """Names of published blocks, the oldest first; some of them may be taken since."""
        self._returns: list[_Return] = []
        self._written = 0.0
        """When blocks were handed over last."""
        self._unwritten_states: dict[bytes, None] = {}
        self._disks = [disk] if disk.states is None else [disk, disk.states]
        if disk.room is None:
            cache.published = self._unwritten
            if states is not None:
                states.published = self._unwritten_states

    def waits(self) -> bool:
        """Say whether blocks are being brought back, and no read is done."""
        return bool(self._returns) and not any(each.is_done for each in self._returns)

    def next_time(self) -> float:
        """Tell the time by which a sequence goes on though its read is not done."""
        return min([each.until for each in self._returns], default=inf)

    def leave(self, seq: Sequence) -> None:
        self._looked.discard(seq)

    def divert(self, seq: Sequence, now: float) -> bool:
        """Have blocks brought back for a waiting sequence, once -> whether it waits for them now."""
        if seq in self._looked:
            return False
        self._looked.add(seq)
        for disk in self._disks:
            disk.look()
        if (found := self._fetch_blocks(seq, now)) is None:
            return False
        self._waiting.remove(seq)
        seq.place = Place.DIVERTED
        self._returns.append(found)
        return True

    def _fetch_blocks(self, seq: Sequence, now: float) -> _Return | None:
        """Have blocks read for a sequence, if that is of use."""
        may_end = None if self._states is None else self._may_end
        count, prefix = self._cache.prefix_with(seq, self._disk, may_end)
        names = [name for name, block in prefix if block is None]
        held = [block for _, block in prefix if block is not None]
        state = self._missing_state(seq, count)
        start = self._cache.cached_tokens(seq)
        if not (names or state) or not self._cache.fits(seq):
            return None
        pool = self._cache.pool
        if len(names) + sum(not pool.users(block) for block in held) > pool.free:
            return None
        computing, reading = self._computing(start, count), self._disk.pace.expected(len(names))
        if state is not None and self._disk.states is not None:
            reading += self._disk.states.pace.expected(1)
        if reading > computing:
            self._disk.pace.doubt()
            return None
        pool.share(held)
        taken = pool.take(len(names))
        read, rest = BlockRead(names, taken), iter(taken)
        blocks = [next(rest) if block is None else block for _, block in prefix]
        behind = self._read_state(state)
        self._disk.read(read)
        return _Return(seq, read, blocks, now + max(_PATIENCE, computing), behind)

    def _may_end(self, name: bytes) -> bool:
        """Say whether the state of this name is remembered, or on disk."""
        found, on_disk = self._states is not None and name in self._states, self._disk.states
        return found or (on_disk is not None and name in on_disk)

    def _missing_state(self, seq: Sequence, blocks: int) -> bytes | None:
        """The name of the state behind so many blocks of a prefix, if it is on disk only."""
        if self._states is None or not blocks:
            return None
        name = seq.block_hash(blocks - 1, self._cache.block_size)
        return name if self._states.find(name) is None else None

    def _read_state(self, name: bytes | None) -> BlockRead | None:
        """Have a state brought back, if there is one and a place for it."""
        if name is None or self._states is None or self._disk.states is None:
            return None
        if (place := self._states.take()) is None:
            return None
        read = BlockRead([name], [place])
        self._disk.states.read(read)
        return read

    def _land_state(self, read: BlockRead, now: float, *, is_void: bool) -> None:
        if self._states is not None and self._disk.states is not None:
            self._disk.states.end(read, now)
            self._states.put(read.names[0], read.blocks[0], is_filled=read.loaded[0] and not is_void)

    def _computing(self, start: int, blocks: int) -> float:
        """The seconds in which the tokens of these blocks from `start` on would be computed."""
        count = max(0, blocks * self._cache.block_size - start)
        return self._step_time.tokens(count, count * start + count * count // 2)

    def poll(self, now: float, in_flight: int) -> OutputsByClient:
        """Publish blocks that are back, and let sequences go on whose reads are done, or take too long.

        What the next steps may take is saved first, if there is memory for it.
        """
        if self._disk.room is not None:
            self._save_leaving()
        for each in [each for each in self._returns if each.is_done or now >= each.until]:
            self._returns.remove(each)
            if each.read.names:
                self._disk.end(each.read, now)
            if each.state is not None:
                self._land_state(each.state, now, is_void=each.is_void)
            for name, block, loaded in zip(each.read.names, each.read.blocks, each.read.loaded, strict=True):
                if loaded and not each.is_void:
                    self._cache.pool.publish(block, name)
            self._cache.pool.release(each.blocks)
            each.seq.place = Place.WAITING
            if not (each.seq.done or each.seq.paused):
                self._waiting.add(each.seq)
        return {}

    def work_beside(self, now: float, in_flight: int, wait: bool) -> None:
        """Have blocks written beside steps; without any, wait for a read if the engine may."""
        if in_flight and self._disk.room is None:
            self.write(now, idle=False)
        elif wait and not in_flight and self._returns:
            self._returns[0].wait(self._disk, now)

    def work_idle(self, now: float) -> None:
        """Have blocks written while nothing runs."""
        self.write(now, idle=True)

    def write(self, now: float, *, idle: bool) -> bool:
        """Have some published blocks written, or else states, if it is time -> whether any were."""
        if self._disk.room is not None:
            return self._save_leaving()
        for queue in (self._unwritten, self._unwritten_states):
            while len(queue) > 2 * self._cache.pool.count:  # the disk does not keep up
                del queue[next(iter(queue))]
        if not (self._unwritten or self._unwritten_states):
            return False
        due = self._written + max(disk.write_seconds for disk in self._disks) / _PART_OF_TIME
        if not idle and now < due:
            return False
        states = self._states
        wrote = self._write_to(self._disk, self._unwritten, self._cache.pool.find, idle=idle)
        if not wrote and states is not None and self._disk.states is not None:
            wrote = self._write_to(self._disk.states, self._unwritten_states, states.find, idle=idle)
        if wrote:
            self._written = now
        return wrote

    def _save_leaving(self) -> bool:
        """Have blocks and states saved that are about to be forgotten -> whether any were."""
        wrote = False
        for disk, cached in ((self._disk, self._cache.pool), (self._disk.states, self._states)):
            if disk is not None and cached is not None and disk.room is not None and disk.may_write:
                names = cached.leaving(min(disk.room, _STEPS_AHEAD * disk.most))
                queue = dict.fromkeys(name for name in names if name not in disk)
                wrote |= self._write_to(disk, queue, cached.find, idle=True)
        return wrote

    def _write_to(self, disk: CacheTier, queue: dict[bytes, None], find: Find, *, idle: bool) -> bool:
        """Have what is found of these names written, the first ones first -> whether there was anything."""
        if not disk.may_write:
            return False
        most = disk.most if idle else min(disk.most, max(1, _AT_ONCE // disk.block_bytes))
        names: list[bytes] = []
        blocks: list[int] = []
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

    def stop(self) -> None:
        """Write what can be written in a moment; what lies in memory ends with the engine."""
        until = time.monotonic() + _MOST_WRITING
        while self.write_rest(time.monotonic(), until):
            pass

    def write_rest(self, now: float, until: float) -> bool:
        """Have the next blocks written behind those that are, and wait for these -> whether some are left."""
        if self._disk.room is not None:  # memory ends with the engine
            return False
        return self._rest(max(0.0, until - now)) and self.write(now, idle=True)

    def add_stats(self, stats: Stats) -> Stats:
        """Tell what became of blocks in files, or in the host's memory."""
        totals = self._disk.totals
        return replace(stats, disk=totals) if self._disk.room is None else replace(stats, host=totals)

    def forget_prefixes(self) -> None:
        """Forget all that is on disk, and what is on its way from there or to it."""
        self._unwritten.clear()
        self._unwritten_states.clear()
        for each in self._returns:
            each.is_void, each.until = True, 0.0
        for disk in self._disks:
            disk.forget_all()
