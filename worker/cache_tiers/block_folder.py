"""A folder of files of cache blocks, or of packed weights, that engines share, and never beyond a budget.

What is there of other models and options counts, too. Files that were used longest ago give way first. Who
makes room or a new file holds a lock of the folder; who writes one holds a lock of that file, so that what a
killed process has left can be told from what another one is writing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from worker.cache_tiers.block_files import open_regular, write_all
from worker.host.private_folder import make_private

ENDING, _UNFINISHED = ".blocks", ".part"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BlockFolder:
    def __init__(self, parent: Path, identity: str, budget: int, kind: str = "blocks") -> None:
        """Make the folder, or use the one that is there.

        `budget`: the most bytes of all files of this kind together, of whichever identity.
        """
        self.root = parent / f"facet-{kind}-{os.geteuid()}"
        self.identity = identity
        self.budget = budget
        self._own = self.root / identity
        self._make()
        self.used = sum(size for _, size, _ in self._files())
        """The bytes of all files, when that was counted last."""

    def names(self) -> dict[str, Path]:
        """The finished files of this identity. Raises OSError."""
        with os.scandir(self._own) as entries:
            return {entry.name: Path(entry.path) for entry in entries if entry.name.endswith(ENDING)}

    def tidy(self) -> None:
        """Remove what killed writers have left, and what is beyond the budget. Raises OSError."""
        with self._alone():
            self._make_room(0)

    def is_being_filled(self) -> bool:
        """Whether another process writes a file of this identity, or did a moment ago. Raises OSError."""
        return any(path.suffix == _UNFINISHED and _is_being_written(path) for path in self._own.iterdir())

    def write(self, pieces: list[bytes | memoryview], *, lasting: bool = False) -> Path:
        """Make a file of these pieces -> its path, once it is whole. Raises OSError.

        `lasting`: nobody looks at all bytes when it is found, so it gets its name when the disk has them.
        """
        nbytes = sum(len(piece) for piece in pieces)
        path = self._own / f"{time.time_ns():x}-{os.getpid()}{ENDING}"
        part = path.with_suffix(_UNFINISHED)
        self._make()
        file = -1
        try:
            with self._alone():
                self._make_room(nbytes)
                file = os.open(part, _NEW, 0o600)
                fcntl.flock(file, fcntl.LOCK_EX)
                os.ftruncate(file, nbytes)  # from here on it counts for all who share the budget
            write_all(file, pieces)
            if lasting:
                os.fsync(file)
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            if file >= 0:
                os.close(file)
        self.used += nbytes
        return path

    def remove_own(self) -> None:
        """Remove all finished files of this identity. Raises OSError."""
        for path in self.names().values():
            path.unlink(missing_ok=True)

    def _make_room(self, nbytes: int) -> None:
        """Remove files until so many bytes fit. Raises OSError. Called with the folder's lock held."""
        files = sorted(self._files())
        self.used = sum(size for _, size, _ in files)
        for _, size, path in files:
            is_part = path.suffix == _UNFINISHED
            if (self.used + nbytes > self.budget or is_part) and not (is_part and _is_being_written(path)):
                path.unlink(missing_ok=True)
                self.used -= size
        if self.used + nbytes > self.budget:
            raise OSError(errno.ENOSPC, f"{nbytes} bytes do not fit into the budget of {self.budget}")

    def _make(self) -> None:
        for folder in (self.root, self._own):
            make_private(folder, for_code=False)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process is in this context."""
        lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """When each file was used last, its bytes and its path."""
        for folder in self.root.iterdir():
            with suppress(NotADirectoryError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # another engine has removed it meanwhile
                        found = entry.stat(follow_symlinks=False)
                        yield found.st_mtime, found.st_size, Path(entry.path)


def _is_being_written(path: Path) -> bool:
    try:
        file = open_regular(path)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
