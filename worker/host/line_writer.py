"""Writes lines to a descriptor in a thread, so that no caller waits for its reader or fails with its disk.

Writing to a pipe that nobody reads takes for ever, and to a full disk it fails. Neither may stop a process
that answers requests: it hands its lines over here, and those that cannot be written are counted.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

MOST_LINES = 1000
"""Lines that wait to be written, at most."""
_MOST_AT_ONCE = 100
_PAUSE = 0.05
"""Seconds between two writes; lines that come meanwhile are written together, which spares their senders."""


class LineWriter:
    def __init__(self, descriptor: int, on_loss: Callable[[int], None]) -> None:
        """`on_loss` is told, in the writer's thread, how many lines were lost once one can be written."""
        self._descriptor = descriptor
        self._on_loss = on_loss
        # Its put() takes no lock of Python's, so that signal handlers may write lines.
        self._waiting: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._not_accepted = self._not_written = self._told = 0
        self._hurry = threading.Event()
        threading.Thread(target=self._run, name="log lines", daemon=True).start()

    @property
    def dropped(self) -> int:
        """The number of lines that were not written, and will not be."""
        return self._not_accepted + self._not_written

    def put(self, line: bytes) -> None:
        """Have a line written, with the newline at its end. This returns at once and never fails."""
        if self._waiting.qsize() < MOST_LINES:
            self._waiting.put(line)
        else:
            self._not_accepted += 1

    def flush(self, seconds: float) -> None:
        """Wait until all lines so far are written, but no longer than `seconds`."""
        done = threading.Event()
        self._waiting.put(done)
        self._hurry.set()
        done.wait(seconds)
        self._hurry.clear()

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            with suppress(Empty):
                while len(batch) < _MOST_AT_ONCE:
                    batch.append(self._waiting.get_nowait())
            written = [self._write(part) for part in _parts(batch)]
            if all(written) and (lost := self.dropped - self._told):
                self._told += lost
                self._on_loss(lost)
            for each in batch:
                if isinstance(each, threading.Event):
                    each.set()
            self._hurry.wait(_PAUSE)

    def _write(self, lines: Sequence[bytes]) -> bool:
        """Write lines, however long it takes; returns whether it was possible."""
        rest = memoryview(b"".join(lines))
        try:
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # another process that writes there, too, never waits
                    poller = select.poll()
                    poller.register(self._descriptor, select.POLLOUT)
                    poller.poll()
        except OSError:
            self._not_written += len(lines)
            return False
        return True


def _parts(batch: Sequence[bytes | threading.Event]) -> Iterator[list[bytes]]:
    """Lines to be written together: no more than other processes' lines cannot come between."""
    part: list[bytes] = []
    size = 0
    for line in batch:
        if isinstance(line, threading.Event):
            continue
        if part and size + len(line) > select.PIPE_BUF:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line)
    if part:
        yield part
