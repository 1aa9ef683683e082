"""A double of a full disk: names can be made on it, but no bytes can be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Every file that is made below `folder` takes no bytes, as `/dev/full` does."""
    real = os.open

    def open_full(path: Any, flags: int, *more: Any, **options: Any) -> int:
        made = real(path, flags, *more, **options)
        makes = flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE
        if not (makes and str(path).startswith(str(folder))):
            return made
        os.close(made)
        return real("/dev/full", os.O_WRONLY)

    with patch.object(os, "open", open_full):
        yield
