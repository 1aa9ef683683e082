"""The files in which several API processes share their metrics. They get their room on the disk before they
are mapped: if a full disk cannot hold a page of a mapped file, a process that writes to it ends with SIGBUS.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

KINDS = "counter", "histogram"
"""The kinds of metrics that are shared: prometheus_client has a file for each in each process."""
FIRST_BYTES = 1 << 18
"""The room of a file at first."""
_ENTRY_BYTES = 32
"""The most bytes of an entry beside its key."""


def make_files(folder: Path) -> str | None:
    """Make this process's files, before prometheus_client opens them; returns why they cannot be, or None."""
    paths = [folder / f"{kind}_{os.getpid()}.db" for kind in KINDS]
    try:
        for path in paths:
            path.write_bytes(bytes(FIRST_BYTES))
    except OSError as error:
        for path in paths:
            path.unlink(missing_ok=True)
        return error.strerror
    return None


def keep_files_allocated() -> None:
    """Have files get their room before they grow, too. A value for which there is none is not shown.

    Call this before the first metric is made, and after `share_metrics`.
    """
    from prometheus_client import values  # which reads the variable of share_metrics when it is imported
    from prometheus_client.mmap_dict import MmapedDict

    class AllocatedDict(MmapedDict):
        def _init_value(self, key: str) -> None:
            needed, capacity = self._used + len(key.encode()) + _ENTRY_BYTES, self._capacity
            while capacity < needed:
                capacity *= 2
            if self._f is not None:
                _extend(self._f.fileno(), capacity)
            super()._init_value(key)

        def read_value(self, key: str) -> tuple[float, float]:
            try:
                return super().read_value(key)
            except OSError:
                return 0.0, 0.0

        def write_value(self, key: str, value: float, timestamp: float) -> None:
            with suppress(OSError):  # it is tried again when the value changes
                super().write_value(key, value, timestamp)

    setattr(values, "MmapedDict", AllocatedDict)  # noqa: B010, it is what this module imported


def _extend(descriptor: int, nbytes: int) -> None:
    """Give a file, which is written at its end, room for so many bytes."""
    missing = nbytes - os.fstat(descriptor).st_size
    while missing > 0:
        missing -= os.write(descriptor, bytes(missing))
