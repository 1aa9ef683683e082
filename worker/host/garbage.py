"""When Python looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_looking_for_garbage() -> Iterator[None]:
    """Have Python look for garbage after this, but not during it, as nothing that is imported is garbage.

    What was made meanwhile is not visited at once, either: it counts as old.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else the program has frozen objects of its own
            gc.freeze()
            gc.unfreeze()
        gc.enable()
