"""Reads the stack of a thread of this process, and how long all threads waited for a core."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import suppress

_TASKS = "/proc/self/task"


class CoreWaits:
    """Adds up the time in which threads of this process waited for a core, because others had them all.

    On a machine that is short of cores, whoever waits for another thread waits for a core, too: such time is
    no sign of work that takes long. Where the system does not tell of it, as beside Linux, it is 0.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """The time of all threads together, as of the last call of `update`."""
        self._known: dict[str, int] = {}
        """Thread -> the nanoseconds that it had waited then."""
        self._lock = threading.Lock()
        self.update()

    def update(self) -> float:
        """Read what the system has counted until now; returns `seconds`."""
        with self._lock, suppress(OSError):
            for id in os.listdir(_TASKS):
                waited = _waited(id)
                self.seconds += max(0, waited - self._known.get(id, 0)) / 1e9
                self._known[id] = waited
        return self.seconds


def _waited(id: str) -> int:
    """The nanoseconds that a thread has waited; 0 if it has ended."""
    try:
        with open(f"{_TASKS}/{id}/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError):
        return 0


def stack_of(thread: int) -> str:
    """Returns the lines of the stack of a thread, by its `threading.get_ident()`; "" if it has ended."""
    # A name for all frames would make a circle of them and this one, with all that they hold.
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
