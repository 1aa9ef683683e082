"""The file of keys while it is used: read at the start, on demand, and when it has changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from server.access.keys.key_file import Key, KeyFileError, read_keys

LOOK_SECONDS = 0.5
"""Seconds between looks at the file's state."""
QUIET_SECONDS = 1.0
"""Seconds for which a changed file must stay as it is before it is read: it may be half written."""

State = tuple[int, int, int]
"""What tells one state of a file from another without reading it."""

_log = logging.getLogger(__name__)


class FollowedKeyFile:
    """Tells all keys of a file whenever it has changed. While it is broken, those told last are valid."""

    def __init__(
        self,
        path: Path,
        on_keys: Callable[[Sequence[Key]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._on_keys = on_keys
        self._clock = clock
        self._read: State | None = None
        """The state in which the file was when it was last read, with or without success."""
        self._seen: State | None = None
        self._since = 0.0
        """When that state was seen first."""
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have the file read soon, changed or not."""
        self._asked.set()

    async def follow(self) -> None:
        """Reads the file whenever that is asked for, or it has changed. It is parsed in a thread."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), LOOK_SECONDS)
            if self._asked.is_set() or self.has_changed():
                self._asked.clear()
                self.take(await asyncio.to_thread(self.read))

    def has_changed(self) -> bool:
        """Whether the file is another one than that which was read, and has been for a while."""
        state, now = _state_of(self._path), self._clock()
        if state != self._seen:
            self._seen, self._since = state, now
        return state != self._read and now - self._since >= QUIET_SECONDS

    def read(self) -> list[Key] | KeyFileError:
        """Reads the file, whatever its state is."""
        self._read = _state_of(self._path)
        try:
            return read_keys(self._path)
        except KeyFileError as error:
            return error

    def take(self, found: list[Key] | KeyFileError) -> None:
        """Tells what was read, all or nothing."""
        if isinstance(found, KeyFileError):
            _log.error("the file of keys cannot be used, and what was valid stays valid: %s", found)
            return
        self._on_keys(found)
        _log.info("%s: %d keys are valid now", self._path, len(found))


def _state_of(path: Path) -> State | None:
    """The state of a file now; None if it is not there, or must not be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
