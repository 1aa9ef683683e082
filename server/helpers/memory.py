"""How processes bound the memory that they take, and give back what they do not need any more."""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import suppress


def set_most_memory(more: int, *, for_good: bool = False) -> None:
    """Bounds the address space to so many bytes more than it has now."""
    now, _ = _memory()
    if now:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        bound = now + more if most < 0 else min(now + more, most)
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound if for_good else most))


def unset_most_memory() -> None:
    """Goes back to the bound that is for good."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def resident() -> int:
    """The bytes of memory that this process has; 0 where they are not known."""
    return _memory()[1]


_M_TRIM_THRESHOLD = -1
_MOST_FREE = 1 << 20
"""The most bytes that are free at the end of the heap of a thread."""


def bound_free_memory() -> None:
    """Have the heaps of threads give back what is free at their ends: `malloc_trim` leaves it to them.

    Each comes to keep up to 64 MiB otherwise: the bound grows with the largest piece that was freed.
    """
    system = ctypes.CDLL(None)
    if hasattr(system, "mallopt"):  # only glibc has it
        system.mallopt(_M_TRIM_THRESHOLD, _MOST_FREE)


def trim_heap() -> None:
    """Gives the allocator's free memory back to the system, where that is glibc's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back() -> int:
    """Gives all free memory back to the system, and returns the bytes that are left."""
    gc.collect()
    trim_heap()
    return resident()


def _memory() -> tuple[int, int]:
    """The address space in bytes, and what is resident of it. Both are 0 where the system is not Linux, which
    alone can bound them."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = file.read().split()
    except FileNotFoundError:
        return 0, 0
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()
