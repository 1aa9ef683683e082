"""Records of a card's cache in the host's pinned memory: what the card was about to forget is found there.

Names and slots change in line with steps, in the thread that runs these. Copies are made beside them by
`HostCopies`, and a thread of this store waits for each, so that an engine never does.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from worker.cache_tiers.block_read import BlockRead, ReadPace
from worker.cache_tiers.host_copies import AtOnce, HostCopies, Mark
from worker.protocol import DiskTotals

_log = logging.getLogger(__name__)


class HostStore:
    write_seconds = pause = 0.0

    def __init__(self, copies: HostCopies, states: HostStore | None = None, first: int = 0) -> None:
        """`first`: the first slot for records that are saved; those before it are left to others."""
        self.room = copies.slots - first
        """The most records that are held."""
        self.block_bytes, self.most = copies.record_bytes, min(copies.most, self.room)
        self.states = states
        """The store of states, if layers of the model keep some behind blocks."""
        self.pace = ReadPace()
        self.version = 0
        """This changes whenever other names are found."""
        self._copies = copies
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """The slot of each record, the least recently used first."""
        self._free: list[int] = []
        self._used = first  # slots before this one hold a record, or have held one
        self._lock = threading.Lock()  # held while slots are given away, or copies are started
        self._rests = threading.Event()
        self._rests.set()
        self.is_broken = False
        """Whether a copy has failed: nothing is found or saved any more."""
        self._written = self._read = self._failures = 0
        self._after_steps: Callable[[Callable[[], None]], object] = lambda task: task()
        self._tell: Callable[[object], None] = lambda _: None
        self.saved: Callable[[list[bytes], list[int]], None] = lambda _, __: None
        """A function that is told names, and the slots in which their records are now."""
        self.fetch: Callable[[BlockRead, int], int | None] = lambda _, lost: lost
        """A function that has records of a read, from one on that is not here, fetched from elsewhere, and
        returns the index of the first one that is lost already, if one is."""
        self._under_way: SimpleQueue[tuple[Mark, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._wait_for_all, name="host-copies", daemon=True)
        self._thread.start()

    def begin(
        self, after_steps: Callable[[Callable[[], None]], object], tell: Callable[[object], None]
    ) -> None:
        """Take a function that calls another one behind all steps that were submitted, and one to call when
        something is done."""
        self._after_steps, self._tell = after_steps, tell
        if self.states is not None:
            self.states.begin(after_steps, tell)

    def tell_blocks(self, tell: Callable[[object], None]) -> None:
        """Take a function that is called when something is done."""
        self._tell = tell

    def stop(self) -> None:
        """Begin nothing any more, and end what was begun."""
        self._after_steps, self._tell = lambda _: None, lambda _: None
        self._under_way.put(None)
        self._thread.join()

    def close(self) -> None:
        """Give the memory back. Nothing is found any more."""
        if self.states is not None:
            self.states.close()
        self.stop()
        self._slots.clear()
        self._copies.close()

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots and not self.is_broken

    def __len__(self) -> int:
        return len(self._slots)

    def names(self) -> set[bytes]:
        """The names of all records that can be found."""
        return set() if self.is_broken else set(self._slots)

    @property
    def totals(self) -> DiskTotals:
        """The totals of blocks, and the bytes and failures of states, too."""
        stores = [self] if self.states is None else [self, self.states]
        sums = [
            sum(count * store.block_bytes for store, count in zip(stores, counts, strict=True))
            for counts in zip(*((each._written, each._read, len(each)) for each in stores), strict=True)
        ]
        failures = sum(each._failures for each in stores)
        return DiskTotals(self._written, sums[0], self._read, sums[1], failures, sums[2])

    @property
    def may_write(self) -> bool:
        """Whether no records are being saved."""
        return self._rests.is_set() and not self.is_broken

    def rest(self, seconds: float) -> bool:
        """Wait until no records are being saved -> whether that is so."""
        return self._rests.wait(seconds)

    def write(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Save these records, `most` at most, in place of those used longest ago. Called when it may be."""
        self._rests.clear()
        self._after_steps(partial(self._save, names, blocks))

    def look(self) -> None:
        """Do nothing: no other engine saves anything here."""

    def forget_all(self) -> None:
        """Find nothing any more of what was saved till now."""
        self._after_steps(self._forget)

    def read(self, read: BlockRead) -> None:
        """Have records brought back, behind all steps that were submitted."""
        self.pace.begin(read)
        self._after_steps(partial(self._bring_all, read))

    def end(self, read: BlockRead, now: float) -> None:
        """Give a read up, if it is not done, and learn from it. To be called once for each."""
        self._read += self.pace.end(read, now)
        if not read.done.is_set():
            self._after_steps(self._guard)  # others may get its places now

    def wait_for(self, read: BlockRead, seconds: float) -> None:
        """Wait until a read is done, but no longer than so many seconds."""
        read.done.wait(max(0.0, seconds))

    def bring(
        self, read: BlockRead, first: int, slots: Sequence[int], lost: Sequence[int], then: Callable[[], None]
    ) -> None:
        """Bring records of a read, from `first` on, out of slots that others have filled, or none if it was
        given up.

        `lost`: the indices of those that do not come. `then`: called when all is done.
        """

        def landed() -> None:
            self._land(read, range(first, first + len(slots)), lost)
            then()

        with self._lock:
            mark = None if read.is_given_up else self._start(slots, read.blocks[first : first + len(slots)])
        self._under_way.put((mark or AtOnce(), landed))  # behind what was started before

    # In the thread that runs steps.

    def _save(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        with self._lock:
            new = [(name, block) for name, block in zip(names, blocks, strict=True) if name not in self]
            taken = {name: (block, slot) for name, block in new if (slot := self._take_slot()) is not None}
            mark = None
            try:
                if taken and not self.is_broken:
                    mark = self._copies.save(*zip(*taken.values(), strict=True))
            except Exception as error:
                self._fail(error)
            if mark is not None:
                self._slots.update({name: slot for name, (_, slot) in taken.items()})
                self.version += 1
                self._written += len(taken)
        if mark is None:
            self._rests.set()
            self._tell(None)
        else:
            slots = {name: slot for name, (_, slot) in taken.items()}
            self._under_way.put((mark, partial(self._tell_saved, slots)))

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._used < self._copies.ready:
            self._used += 1
            return self._used - 1
        if not self._slots:
            return None
        self.version += 1
        return self._slots.popitem(last=False)[1]

    def _bring_all(self, read: BlockRead) -> None:
        """Start to bring all blocks up to one that is lost."""
        with self._lock:
            found: dict[int, int] = {}
            lost = None
            while lost is None and (index := read.take()) is not None:
                if (name := read.names[index]) in self:
                    found[index] = self._slots[name]
                else:
                    lost = index
            for index in reversed(found):  # of one prompt the beginning goes last
                self._slots.move_to_end(read.names[index])
            mark = self._start([*found.values()], [read.blocks[index] for index in found])
        if lost is not None:
            lost = self.fetch(read, lost)
        landed = partial(self._land, read, [*found], [] if lost is None else [lost])
        if mark is None:
            landed()
        else:
            self._under_way.put((mark, landed))

    def _guard(self) -> None:
        with self._lock:
            self._copies.guard()

    def _forget(self) -> None:
        with self._lock:
            self._free += self._slots.values()
            self._slots.clear()
            self.version += 1

    # In any thread.

    def _start(self, slots: Sequence[int], places: Sequence[int]) -> Mark | None:
        """Start to bring records -> the point when they are there; None if there are none."""
        try:
            return self._copies.bring(slots, places) if slots and not self.is_broken else None
        except Exception as error:
            self._fail(error)
            return None

    # In the thread that waits.

    def _wait_for_all(self) -> None:
        while waits := self._under_way.get():
            mark, landed = waits
            try:
                mark.synchronize()
            except Exception as error:
                self._fail(error)
            landed()
            self._tell(None)

    def _tell_saved(self, slots: dict[bytes, int]) -> None:
        if not self.is_broken:
            self.saved([*slots], [*slots.values()])
        self._rests.set()

    def _land(self, read: BlockRead, found: Sequence[int], lost: Sequence[int]) -> None:
        for index in found:
            read.land(index, None if self.is_broken else lambda: None)  # the device has brought it
        for index in lost:
            read.land(index, None)

    def _fail(self, error: Exception) -> None:
        """Use nothing of it any more: after an error nobody knows what was copied."""
        self._failures += 1
        self.version += 1
        if not self.is_broken:
            self.is_broken = True
            _log.warning("--kv-offloading-size: a copy failed, and nothing more is kept there: %s", error)
