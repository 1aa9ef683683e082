"""Gives the memory of long bodies back to the system.

The heap keeps what is freed between other things: after 256 MiB of bodies it kept nearly all of that.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

TRIM_AFTER = 3.0
"""Seconds from a long body to the search for free memory, which takes up to some hundredths of one."""


def _give_back() -> None:
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):  # only glibc has it
        system.malloc_trim(0)


class HeapTrimmer:
    def __init__(self, give_back: Callable[[], None] = _give_back) -> None:
        self._give_back = give_back
        self._due = False

    def trim_soon(self) -> None:
        """Call this in the event loop when much memory is about to be freed."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(TRIM_AFTER, self._trim)

    def _trim(self) -> None:
        self._due = False
        self._give_back()
