"""A folder that nobody but its owner may write, for compiled code and the like: rights, room, and a lock.

Whatever lies there is loaded into this process, so files that others could have written must not be used.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PAUSE = 0.05


def make_folders(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, so that nobody else may read them.

    `Path.mkdir` gives its mode to the last folder alone. Raises OSError.
    """
    if not folder.parent.exists():
        make_folders(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def make_private(folder: Path, *, for_code: bool = True) -> None:
    """Make a folder that only this user can write, and where code may be executed, or raise OSError."""
    make_folders(folder)
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        folder.chmod(0o700)
        found = folder.stat()
    if reason := _distrust(found):
        raise PermissionError(f"{folder} {reason}")
    if for_code and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise PermissionError(f"{folder} lies where nothing may be executed")


def is_trusted(file: Path) -> bool:
    """Whether this is a file that nobody but this user and root could have written."""
    try:
        found = file.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and _distrust(found) is None


def file_states(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """The path, the size and the time of the last change of each file, to see if one changes."""
    found = ((str(path), path.stat()) for path in sorted(paths) if path.is_file())
    return [(path, state.st_size, state.st_mtime_ns) for path, state in found]


def check_room(folder: Path, nbytes: int) -> None:
    """Raise OSError if so many bytes cannot be written there."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


@contextmanager
def taking_turns(folder: Path, seconds: float) -> Iterator[None]:
    """Wait while another process or thread is in this context for the same folder, for `seconds` at most."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + seconds
        with suppress(OSError):  # some network file systems have no locks: then both do the same work
            while not _locked(lock) and time.monotonic() < until:
                time.sleep(_PAUSE)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _distrust(found: os.stat_result) -> str | None:
    """The reason why others could have written this, or None."""
    if found.st_uid not in (_ROOT, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return "can be written by others"
    return None
