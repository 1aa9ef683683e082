"""The blocks on disk by name, the thread that writes blocks there, and those that bring them back.

An engine never waits for these threads: blocks are copied before they are written, and are checked before
they enter the cache. Whatever a disk does costs time, and is counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np

from worker.cache_tiers.block_files import (
    BlockFile,
    Bytes,
    Head,
    digest_of,
    open_regular,
    padded,
    read_head,
    read_record,
)
from worker.cache_tiers.block_folder import BlockFolder
from worker.cache_tiers.block_read import BlockRead, ReadPace
from worker.cache_tiers.record_memory import RecordMemory
from worker.protocol import DiskTotals

_AT_ONCE = 16 << 20
"""The most bytes that are copied and written at once, if these are several blocks."""
_READERS = 2
_LOOK_AGAIN = 1.0
"""The seconds after which files of other engines are looked for again."""
_PAUSE = 30.0
"""The seconds for which nothing is written after that has failed."""

_log = logging.getLogger(__name__)


class BlockStore:
    room = None

    def __init__(self, folder: BlockFolder, memory: RecordMemory) -> None:
        self.block_bytes = memory.record_bytes
        self.most = max(1, _AT_ONCE // self.block_bytes)
        """The most blocks that are written at once."""
        self.write_seconds = 0.0
        """The seconds that the last write took."""
        self.states: BlockStore | None = None
        """The store of states, if layers of the model keep some behind blocks."""
        self.pace = ReadPace()
        self.make_pages: Callable[[int], None] = lambda _: None
        """A function that returns when the first so many blocks of the cache have pages of memory."""
        self.version = 0
        """This changes whenever other names are found."""
        self._folder = folder
        self._memory: RecordMemory | None = memory
        self._record_bytes = padded(self.block_bytes)
        self._files: dict[str, BlockFile | None] = {}
        """The files that were looked at, by name; None: one that is of no use."""
        self._index: dict[bytes, tuple[BlockFile, int]] = {}
        self._copies = np.zeros((self.most, self._record_bytes), np.uint8)
        self._rests = threading.Event()
        self._rests.set()
        self._next_write = self._last_look = 0.0
        self._last_warning = -_PAUSE
        self._written = self._bytes_written = self._read = self._bytes_read = self._failures = 0
        self._after_steps: Callable[[Callable[[], None]], object] = lambda task: task()
        self._tell: Callable[[object], None] = lambda _: None
        self._tells_blocks = False
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._reads: SimpleQueue[BlockRead | None] = SimpleQueue()
        self._look()
        targets = [self._write_all, *[self._read_all] * _READERS]
        self._threads = [threading.Thread(target=each, name="prefix-disk", daemon=True) for each in targets]
        for thread in self._threads:
            thread.start()
        self._writes.put(folder.tidy)

    def begin(
        self, after_steps: Callable[[Callable[[], None]], object], tell: Callable[[object], None]
    ) -> None:
        """Take a function that calls another one behind all steps that were submitted, and one to call when
        something is done."""
        self._after_steps, self._tell = after_steps, tell
        for each in self._beside:
            each.begin(after_steps, tell)

    def tell_blocks(self, tell: Callable[[object], None]) -> None:
        """Take a function that is called when something is done, or one block has come back."""
        self._tell, self._tells_blocks = tell, True

    def close(self) -> None:
        """End the threads; one that waits for a disk is left to itself."""
        self._tell = lambda _: None
        for each in self._beside:
            each.close()
        self._writes.put(None)
        for _ in range(_READERS):
            self._reads.put(None)
        for thread in self._threads:
            thread.join(0.5)
        self._memory, self._copies = None, self._copies[:0]  # the cache goes back to the system

    def __contains__(self, name: bytes) -> bool:
        return name in self._index

    def __len__(self) -> int:
        return len(self._index)

    def names(self) -> set[bytes]:
        """The names of all blocks that can be found."""
        return set(self._index)

    @property
    def totals(self) -> DiskTotals:
        """The totals of blocks, and the bytes and failures of states, too."""
        beside = [each.totals for each in self._beside]
        return DiskTotals(
            *(self._written, self._bytes_written + sum(each.bytes_written for each in beside)),
            *(self._read, self._bytes_read + sum(each.bytes_read for each in beside)),
            self._failures + sum(each.failures for each in beside),
            max([self._folder.used, *(each.held for each in beside)]),
        )

    @property
    def _beside(self) -> list[BlockStore]:
        """The stores of other records, which begin and end with this one."""
        return [] if self.states is None else [self.states]

    # Writing.

    @property
    def may_write(self) -> bool:
        """Whether no blocks are being written, and writing has not failed just now."""
        return self._rests.is_set() and not self.pause

    @property
    def pause(self) -> float:
        """The seconds for which nothing shall be written, because that has failed."""
        return max(0.0, self._next_write - time.monotonic())

    def rest(self, seconds: float) -> bool:
        """Wait until no blocks are being written -> whether that is so."""
        return self._rests.wait(seconds)

    def write(self, names: list[bytes], blocks: list[int]) -> None:
        """Copy these blocks, `most` at most, and have the copies written. Called when it may be."""
        began, copied = time.monotonic(), list[bytes]()
        if self._memory is not None:
            for name, block, into in zip(names, blocks, self._copies, strict=False):
                self._memory.copy(block, into)
                copied.append(name)
        self._rests.clear()
        self._writes.put(lambda: self._write(copied, began))

    def look(self) -> None:
        """Have files of other engines looked for, unless that was done just now."""
        if time.monotonic() > self._last_look + _LOOK_AGAIN:
            self._last_look = time.monotonic()
            self._writes.put(self._look)

    def forget_all(self) -> None:
        """Find nothing any more, and remove all files of this identity."""
        self._index.clear()
        self.version += 1
        if self._memory is not None:
            self._writes.put(self._remove_all)
        else:  # the threads have ended
            with suppress(OSError):
                self._folder.remove_own()

    def _write_all(self) -> None:
        while task := self._writes.get():
            try:
                task()
            except OSError as error:
                self._cannot_write(error)
            finally:
                self._tell(None)

    def _cannot_write(self, error: OSError) -> None:
        self._fail("cannot be written", error)
        self._next_write = time.monotonic() + _PAUSE

    def _write(self, names: list[bytes], began: float) -> None:
        try:
            if names:
                self._write_file(names)
        except OSError as error:
            self._cannot_write(error)
        finally:
            self.write_seconds = time.monotonic() - began
            self._rests.set()

    def _write_file(self, names: list[bytes]) -> None:
        copies = self._copies[: len(names)]
        digests = [digest_of(name, copy) for name, copy in zip(names, copies, strict=True)]
        head = Head(self._folder.identity, self._record_bytes, names, digests).encode()
        path = self._folder.write([head, copies.data.cast("B")])
        self._written += len(names)
        self._bytes_written += len(names) * self.block_bytes
        self._look()
        if path.name not in self._files:
            raise FileNotFoundError(f"{path} is gone")

    def _look(self) -> None:
        """Compare what is known of files with what there is."""
        found = self._folder.names()
        self.version += found.keys() != self._files.keys()
        for name in self._files.keys() - found.keys():
            self._drop(self._files.pop(name))
        for name in sorted(found.keys() - self._files.keys()):
            file = None
            with suppress(OSError, msgspec.MsgspecError):
                file = read_head(found[name], self._folder.identity, self._record_bytes)
            self._files[name] = file
            if file is None:
                self._fail("is damaged", found[name])
                remove(found[name])
            else:
                self._index.update({each: (file, place) for place, each in enumerate(file.head.names)})

    def _remove_all(self) -> None:
        self._folder.remove_own()
        self._look()

    # Reading.

    def read(self, read: BlockRead) -> None:
        """Have blocks read, behind all steps that were submitted: those may write where they shall be."""
        self.pace.begin(read)
        self._after_steps(lambda: self._begin(read))

    def end(self, read: BlockRead, now: float) -> None:
        """Give a read up, if it is not done, and learn from it. To be called once for each."""
        loaded = self.pace.end(read, now)
        self._read += loaded
        self._bytes_read += loaded * self.block_bytes

    def wait_for(self, read: BlockRead, seconds: float) -> None:
        """Wait until a read is done, but no longer than so many seconds."""
        read.done.wait(max(0.0, seconds))

    def _begin(self, read: BlockRead) -> None:
        for _ in range(_READERS):
            self._reads.put(read)

    def _read_all(self) -> None:
        record = np.zeros(self._record_bytes, np.uint8)
        while read := self._reads.get():
            opened: dict[BlockFile, int] = {}
            try:
                while (index := read.take()) is not None:
                    self.make_pages(read.blocks[index] + 1)
                    found = self._find(read.names[index], record, opened)
                    bring = partial(self._bring, record, read.blocks[index]) if found else None
                    if read.land(index, bring) or self._tells_blocks:
                        self._tell(None)
            finally:
                for found, file in reversed(opened.items()):  # of one prompt the beginning goes last
                    os.close(file)
                    with suppress(OSError):
                        os.utime(found.path)

    def _find(self, name: bytes, record: Bytes, opened: dict[BlockFile, int]) -> bool:
        """Read a block of this name -> whether it was found as it was written."""
        place = self._index.get(name)
        if place is None:
            return False
        found, index = place
        try:
            if found not in opened:
                opened[found] = open_regular(found.path)
            if read_record(opened[found], found, index, record):
                return True
            self._fail("is damaged", found.path)
            remove(found.path)
        except FileNotFoundError:
            pass  # another engine has made room
        except OSError as error:
            self._fail("cannot be read", error)
        self._drop(found)
        return False

    def _bring(self, record: Bytes, block: int) -> None:
        if self._memory is not None:
            self._memory.bring(block, record)

    def _drop(self, file: BlockFile | None) -> None:
        """Find the blocks of a file no more, but those that another file has, too."""
        self.version += 1
        for name in file.head.names if file is not None else ():
            if self._index.get(name, (None,))[0] is file:
                self._index.pop(name, None)

    def _fail(self, what: str, why: object) -> None:
        self._failures += 1
        if time.monotonic() > self._last_warning + _PAUSE:
            self._last_warning = time.monotonic()
            _log.warning("prefixes on disk: a file %s: %s", what, why)


def remove(path: Path) -> None:
    """Remove a file that is of no use, if the disk can be written."""
    with suppress(OSError):
        path.unlink()
