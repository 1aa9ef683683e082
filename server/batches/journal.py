"""The results of a batch: two append-only files, of answers and of errors, with a line for each request.

Lines are on the disk before anybody hears of them. After a kill a torn last line is cut off, and what has a
line is not computed again, so each request has one line in the end, whatever happened meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

_SLICE, _SLICE_BYTES, _REST = 64, 1 << 20, 0.001
"""Lines or bytes that are read in one go, and the seconds for which the event loop then runs alone."""


class Result(NamedTuple):
    custom_id: str
    failed: bool
    line: bytes
    """The line of the output, without its end."""


class _Named(msgspec.Struct):
    custom_id: str


_name_of = msgspec.json.Decoder(_Named).decode


class Journal:
    """The results that a batch has, to which more are added. Its functions block, but for `keep`."""

    def __init__(self, output: Path, errors: Path) -> None:
        self.done: set[str] = set()
        """The custom_ids of requests that have a line."""
        self._lock = threading.Lock()
        self._waiting: list[Result] = []
        self._turn = asyncio.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._files = [os.open(path, flags, 0o600) for path in (output, errors)]
        self._sizes, self.counts = [0, 0], [0, 0]
        """Bytes, and lines, of answers and of errors."""
        for each, path in enumerate((output, errors)):
            self._read(each, path)
            os.ftruncate(self._files[each], self._sizes[each])

    def _read(self, each: int, path: Path) -> None:
        """Note the whole lines that a file has."""
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.done.add(_name_of(line).custom_id)
                self.counts[each] += 1
                self._sizes[each] += len(line)
                if not self.counts[each] % _SLICE:
                    rest()

    async def keep(self, result: Result) -> None:
        """Adds a result, together with those of others that wait meanwhile. Raises OSError if it cannot."""
        self._waiting.append(result)
        async with self._turn:
            if self._waiting:
                taken, self._waiting = self._waiting, []
                await asyncio.to_thread(self.add, taken)

    def add(self, results: Sequence[Result]) -> None:
        """Add results of requests that have none, so that they are on the disk afterwards."""
        with self._lock:
            new = {each.custom_id: each for each in results if each.custom_id not in self.done}
            for each, file in enumerate(self._files):
                added = [one for one in new.values() if one.failed == bool(each)]
                if added:
                    self._append(file, self._sizes[each], b"".join([one.line + b"\n" for one in added]))
                    self._sizes[each] = os.fstat(file).st_size
                    self.counts[each] += len(added)
                    self.done.update([one.custom_id for one in added])

    def _append(self, file: int, size: int, data: bytes) -> None:
        """Write behind `size` bytes of a file, all or nothing."""
        view, at = memoryview(data), size
        try:
            while view:
                count = os.pwrite(file, view, at)
                view, at = view[count:], at + count
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise

    def close(self) -> None:
        with self._lock:
            for file in self._files:
                os.close(file)
            self._files = []


class LineSlices:
    """Reads the lines of a file in slices, each with its number."""

    def __init__(self, path: Path, most: int) -> None:
        """`most` is the length of the longest line; of a longer one only its beginning is read."""
        self._file = path.open("rb")
        self._most, self._number = most, 0

    def next(self) -> list[tuple[int, bytes]]:
        """The next lines that are not empty; none at the end."""
        found: list[tuple[int, bytes]] = []
        size = 0
        while len(found) < _SLICE and size < _SLICE_BYTES:
            line = self._file.readline(self._most + 1)
            if not line:
                break
            self._number += 1
            size += len(line)
            if len(line) > self._most:
                while (rest := self._file.readline(_SLICE_BYTES)) and not rest.endswith(b"\n"):
                    pass
            if line.strip():
                found.append((self._number, line))
        return found

    def close(self) -> None:
        self._file.close()


def rest() -> None:
    """Let the event loop run, in a thread that reads much."""
    time.sleep(_REST)
