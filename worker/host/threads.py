"""What a thread of this process does: its stack, and how long it was ready to run and had no core."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress


class CoreWait:
    """Measures one thread. Where the system does not tell, as beside Linux, none has ever waited."""

    def __init__(self, native_id: int) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def seconds(self) -> float:
        """The seconds that the thread has waited for a core since it began."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has ended
            return 0.0

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def stack_of(thread: int) -> str:
    """Returns the lines of the stack of a thread, by its `threading.get_ident()`; "" if it has ended."""
    # A name for all frames would make a circle of them and this one, with all that they hold.
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
