"""A double of a full disk: names can be made on it, but no bytes can be written."""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from server.batches.database import Database


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Every file that is made below `folder` takes no bytes, as `/dev/full` does, and no transaction of a
    database can be ended."""
    real, real_write = os.open, Database.write

    def open_full(path: Any, flags: int, *more: Any, **options: Any) -> int:
        made = real(path, flags, *more, **options)
        makes = flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE
        if not (makes and str(path).startswith(str(folder))):
            return made
        os.close(made)
        return real("/dev/full", os.O_WRONLY)

    @contextmanager
    def write_full(database: Database, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        with real_write(database, durable=durable) as writer:
            yield writer
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.object(os, "open", open_full), patch.object(Database, "write", write_full):
        yield
