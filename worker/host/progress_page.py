"""A page of memory in which a process says how its work goes on, and which its supervisor reads.

The page is a file of the run's private folder that both have mapped: writing costs a step a microsecond and
no system call, and a process that stands still is seen by what it does not write. A reader may meet an entry
that is in part the one before: it acts on what it has seen several times only.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple

STARTING, IDLE, WORKING = range(3)
"""The states of a process: it has not begun to say how it goes, it has nothing to do, it has."""

MOST_ENTRIES = 64
_ENTRY = Struct("<qqqqdd")
_ENTRY_BYTES = 64
_PAGE_BYTES = MOST_ENTRIES * _ENTRY_BYTES
_FULL = errno.ENOSPC, errno.EDQUOT

_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """The state of one process."""

    pid: int
    state: int
    number: int = 0
    """The number of the oldest step in flight, of the event loop's turn, or of a sign that it starts."""
    tokens: int = 0
    """The new tokens of that step; 0 if none is in flight."""
    since: float = 0.0
    """When that step began, on the monotonic clock, or the work for which there is no step yet."""
    usual: float = 0.0
    """The seconds within which nearly all steps of its size end."""


class ProgressPage:
    """A new page, with an entry for a process and for each of those that it starts."""

    def __init__(self, path: Path) -> None:
        """A page that is there already is left to the processes that still write to it.

        If the disk has no room for one, its process is not watched: it would end by writing to it.
        """
        self.path = path
        path.unlink(missing_ok=True)
        try:
            self._memory = _made(path)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            path.unlink(missing_ok=True)
            self._memory = mmap.mmap(-1, _PAGE_BYTES)
            _log.error("a process is not watched: %s cannot be made: %s", path, error.strerror)

    def read(self, index: int) -> Entry:
        return Entry(*_ENTRY.unpack_from(self._memory, index * _ENTRY_BYTES))

    def entries(self) -> list[Entry]:
        """The first entry, and those of the processes after it that have begun to write."""
        found = [self.read(0)]
        while len(found) < MOST_ENTRIES and (one := self.read(len(found))).pid:
            found.append(one)
        return found


class ProgressWriter:
    """Writes one entry of a page."""

    def __init__(self, path: str = "", index: int = 0) -> None:
        """`path` is that of a page which a supervisor has made; without one nobody reads what is written."""
        self._memory: mmap.mmap | bytearray = bytearray(_PAGE_BYTES)
        self._offset = index * _ENTRY_BYTES
        self._pid = os.getpid()
        if path and index < MOST_ENTRIES:
            with suppress(OSError):  # its run has ended
                self._memory = _mapped(path)

    def starting(self, number: int) -> None:
        """Note that the start goes on; `number` is another one each time."""
        self.write(STARTING, number)

    def idle(self) -> None:
        self.write(IDLE)

    def write(
        self, state: int, number: int = 0, tokens: int = 0, since: float = 0.0, usual: float = 0.0
    ) -> None:
        """Write the fields of an `Entry`."""
        # Not packed in place: that clears the entry first, and a process stopped there would seem to start.
        entry = _ENTRY.pack(self._pid, state, number, tokens, since, usual)
        self._memory[self._offset : self._offset + _ENTRY.size] = entry


class StepProgress:
    """Keeps an entry at the oldest step in flight. Steps end in the order in which they began."""

    def __init__(self, writer: ProgressWriter, *, plans: bool = False) -> None:
        """`plans`: with no step in flight there is work nevertheless, to plan one, until `rest` is called."""
        self.since = 0.0
        """When the oldest step in flight began: when it was sent, or when the one before it ended."""
        self._writer = writer
        self._plans = plans
        self._lock = threading.Lock()
        self._in_flight: deque[tuple[int, int, float]] = deque()

    def begin(self, number: int, tokens: int, usual: float = 0.0) -> None:
        """Note that a step is sent, before anyone waits for it."""
        with self._lock:
            self._in_flight.append((number, tokens, usual))
            if len(self._in_flight) == 1:
                self._show(number, tokens, usual)

    def end(self) -> None:
        """Note that the oldest step has ended, whatever it brought."""
        with self._lock:
            number, _, _ = self._in_flight.popleft()
            if self._in_flight:
                self._show(*self._in_flight[0])
            elif self._plans:
                self._show(number)
            else:
                self._writer.idle()

    def rest(self) -> None:
        """Note that there is nothing to do."""
        self._writer.idle()

    def wake(self) -> None:
        """Note that there is something to do, for which no step is in flight yet."""
        self._show(0)

    def _show(self, number: int, tokens: int = 0, usual: float = 0.0) -> None:
        self.since = time.monotonic()
        self._writer.write(WORKING, number, tokens, self.since, usual)


def _made(path: Path) -> mmap.mmap:
    """A new page, whose room on the disk is taken before it is mapped."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, bytes(_PAGE_BYTES))
        return mmap.mmap(descriptor, _PAGE_BYTES)
    finally:
        os.close(descriptor)


def _mapped(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, _PAGE_BYTES)
    finally:
        os.close(descriptor)
