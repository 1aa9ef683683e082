"""A card's records in files, and the newest of them in the host's pinned memory, too.

Records are saved in memory, and written to files from there. What is found in files alone is read into a part
of the memory that is set aside for it, and brought to the card from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.cache_tiers.block_files import Bytes
from worker.cache_tiers.block_read import BlockRead
from worker.cache_tiers.block_store import BlockStore
from worker.cache_tiers.host_copies import HostCopies
from worker.cache_tiers.host_store import HostStore
from worker.protocol import DiskTotals

_PART_ASIDE, _MOST_ASIDE = 4, 4 << 30
"""The part of the memory, and its bytes at most, for records on their way from files to the card."""


class PinnedMemory:
    """The host's memory as files see it: its slots are the places of records."""

    def __init__(self, copies: HostCopies) -> None:
        self.record_bytes = copies.record_bytes
        self._copies = copies

    def copy(self, place: int, into: Bytes) -> None:
        into[: self.record_bytes] = self._copies.record(place)

    def bring(self, place: int, record: Bytes) -> None:
        self._copies.record(place)[:] = record[: self.record_bytes]


@dataclass(slots=True)
class _Landing:
    """The part of a read that files do, as memory does not hold it."""

    read: BlockRead
    first: int
    """The index of its first record."""
    of_files: BlockRead
    """The same records, with slots for places."""
    lost: int | None
    """The index of the record behind them, if there is one: there was no room for it."""


class TieredStore:
    room = None

    def __init__(self, copies: HostCopies, files: BlockStore, states: TieredStore | None = None) -> None:
        """`files`: those whose records are copied from the slots of `copies`, and read into these."""
        aside = max(1, min(copies.slots // _PART_ASIDE, _MOST_ASIDE // copies.record_bytes))
        self._memory, self._files = HostStore(copies, first=aside), files
        self._memory.saved, self._memory.fetch = files.write, self._fetch
        self.block_bytes, self.most = files.block_bytes, min(self._memory.most, files.most)
        self.states = states
        """The store of states, if layers of the model keep some behind blocks."""
        self.pace = self._memory.pace
        self._copies = copies
        self._needed = aside + self.most
        """The slots that must be there before anything is saved, or fetched."""
        self._free = [*range(aside)]
        """The slots that are set aside, but for those in use."""
        self._landings: list[_Landing] = []
        self._lock = threading.Lock()
        self._tell: Callable[[object], None] = lambda _: None
        files.tell_blocks(self._go_on)

    def begin(
        self, after_steps: Callable[[Callable[[], None]], object], tell: Callable[[object], None]
    ) -> None:
        """Take a function that calls another one behind all steps that were submitted, and one to call when
        something is done."""
        self._memory.begin(after_steps, tell)
        self.tell_blocks(tell)
        if self.states is not None:
            self.states.begin(after_steps, tell)

    def tell_blocks(self, tell: Callable[[object], None]) -> None:
        """Take a function that is called when something is done."""
        self._tell = tell
        self._memory.tell_blocks(tell)

    def close(self) -> None:
        """End the threads, and give the memory back. Nothing is found any more there."""
        if self.states is not None:
            self.states.close()
        self._tell = lambda _: None
        self._memory.stop()  # which still hands over what was saved
        self._files.close()
        self._memory.close()

    def __contains__(self, name: bytes) -> bool:
        return not self._memory.is_broken and (name in self._memory or name in self._files)

    def __len__(self) -> int:
        return len(self._files)

    def names(self) -> set[bytes]:
        """The names of all records that can be found."""
        return set() if self._memory.is_broken else self._memory.names() | self._files.names()

    @property
    def version(self) -> int:
        """This changes whenever other names are found."""
        return self._memory.version + self._files.version

    @property
    def totals(self) -> DiskTotals:
        """The totals of files, but of all records that came back; bytes and failures of states, too."""
        files, memory = self._files.totals, self._memory.totals
        states = DiskTotals(0, 0, 0, 0, 0, 0) if self.states is None else self.states.totals
        return DiskTotals(
            *(files.written, files.bytes_written + states.bytes_written),
            *(memory.read, memory.bytes_read + states.bytes_read),
            *(files.failures + memory.failures + states.failures, max(files.held, states.held)),
        )

    @property
    def write_seconds(self) -> float:
        return self._files.write_seconds

    @property
    def pause(self) -> float:
        return self._files.pause

    @property
    def may_write(self) -> bool:
        """Whether nothing is being saved or written, and writing has not failed just now."""
        is_there = self._copies.ready >= self._needed
        return is_there and self._memory.may_write and self._files.may_write

    def rest(self, seconds: float) -> bool:
        """Wait until nothing is being saved or written -> whether that is so."""
        until = time.monotonic() + seconds
        return self._memory.rest(seconds) and self._files.rest(max(0.0, until - time.monotonic()))

    def write(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Save these records, `most` at most, and have them written from there. Called when it may be."""
        self._memory.write(names, blocks)

    def look(self) -> None:
        """Have files of other engines looked for, unless that was done just now."""
        self._files.look()

    def forget_all(self) -> None:
        """Find nothing any more, and remove all files of this identity."""
        self._memory.forget_all()
        self._files.forget_all()

    def read(self, read: BlockRead) -> None:
        """Have records brought back, behind all steps that were submitted."""
        self._memory.read(read)

    def end(self, read: BlockRead, now: float) -> None:
        """Give a read up, if it is not done, and learn from it. To be called once for each."""
        self._memory.end(read, now)
        with self._lock:
            for landing in [each for each in self._landings if each.read is read]:
                self._landings.remove(landing)
                self._files.end(landing.of_files, now)
                self._free += landing.of_files.blocks  # nothing comes there any more

    def wait_for(self, read: BlockRead, seconds: float) -> None:
        """Wait until a read is done, but no longer than so many seconds."""
        read.done.wait(max(0.0, seconds))

    def _fetch(self, read: BlockRead, first: int) -> int | None:
        """Have records from this one on read from files -> the first one that is lost already, or None."""
        with self._lock:
            if not (self._free and self._copies.ready >= self._needed):
                return first
            count = len(read.names) - first
            slots, self._free = self._free[:count], self._free[count:]
            for _ in slots[1:]:
                read.take()
            of_files = BlockRead(read.names[first : first + len(slots)], slots)
            self._landings.append(_Landing(read, first, of_files, read.take()))
            self._files.read(of_files)
        return None

    def _go_on(self, news: object) -> None:
        """Have what came from files brought to the card."""
        with self._lock:
            done = [each for each in self._landings if each.of_files.done.is_set()]
            for landing in done:
                self._landings.remove(landing)
                self._bring(landing)
        self._tell(news)

    def _bring(self, landing: _Landing) -> None:
        self._files.end(landing.of_files, time.monotonic())
        slots, loaded = landing.of_files.blocks, landing.of_files.loaded
        count = loaded.index(False) if False in loaded else len(loaded)
        behind = [] if landing.lost is None else [landing.lost]
        lost = [*range(landing.first + count, landing.first + len(loaded)), *behind]
        self._memory.bring(landing.read, landing.first, slots[:count], lost, lambda: self._leave(slots))

    def _leave(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._free += slots


Store = BlockStore | HostStore | TieredStore
"""The type of what keeps records elsewhere."""
