"""The folder of a run, for sockets and files that its processes share: private, and removed with its owner.

A run that ends in order removes its folder. One that is killed cannot, and the next start does: the folder of
a living run is locked, and the kernel unlocks it when the run's process ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

_LONGEST_PARENT = 66  # a socket's path may have 107 characters on Linux, 103 elsewhere; ours add 37
_NAME = re.compile(r"facet-\d+-[0-9a-f]+(-\d+)?")


class RunFolder:
    """A new folder that only this user may enter, named with this process's id and start time."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        if (length := len(str(parent))) > _LONGEST_PARENT:
            raise ValueError(
                f"the name of {parent}, where sockets are made, has {length} characters, and "
                f"{_LONGEST_PARENT} at most are possible: set TMPDIR to a folder with a shorter name"
            )
        _remove_abandoned(parent)
        self.path, lock = _make(parent)
        self._clean = weakref.finalize(self, _clean, self.path, lock, os.getpid())

    def remove(self) -> None:
        self._clean()


def _make(parent: Path) -> tuple[Path, int]:
    """Makes and locks a folder. If another start removes it before it is locked, it is made again."""
    path = parent / f"facet-{os.getpid()}-{_start_time():x}"
    first, attempt = path, 0
    while True:
        with suppress(FileExistsError):  # this process has started other engines
            path.mkdir(mode=0o700)
            lock = _lock(path)
            if lock is not None:
                return path, lock
        attempt += 1
        path = first.with_name(f"{first.name}-{attempt}")


def _start_time() -> int:
    """When this process was started, in the kernel's ticks since the machine's start, or in seconds."""
    try:
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return int(time.time())


def _lock(path: Path) -> int | None:
    """Locks a folder; returns the descriptor that holds the lock, or None if it is locked or gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of runs of this user whose process has ended."""
    with suppress(OSError):
        for path in parent.iterdir():
            if _NAME.fullmatch(path.name) and path.lstat().st_uid == os.getuid():
                lock = _lock(path)
                if lock is not None:
                    _clean(path, lock, os.getpid())


def _clean(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of the owner
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
