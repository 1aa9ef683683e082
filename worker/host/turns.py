"""A lock by which processes that share a machine's cores compute steps in turn.

Two engines whose threads wait for each other's cores take longer than one after the other. The lock lies in a
page of shared memory, as a robust mutex of the C library: it costs a process that is alone a microsecond, and
the kernel frees it when its holder ends, however that happens.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PLACES = (0, 512)
"""The places of the two mutexes in the page: the right to be next, and the turn. Each has up to 48 bytes."""
_BYTES = 1024
_SHARED, _ROBUST = 1, 1
_ATTRIBUTE_BYTES = 64
PATIENCE = 2.0
"""Seconds to wait for a turn. A step that begins without one is slow; one that never began would be taken
for a process that hangs, when it is another one that does."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def make_page(path: Path) -> None:
    """Make the page for processes that will take turns."""
    system = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    path.write_bytes(bytes(_BYTES))
    path.chmod(0o600)
    memory = _mapped(path)
    system.pthread_mutexattr_init(attributes)
    system.pthread_mutexattr_setpshared(attributes, _SHARED)
    system.pthread_mutexattr_setrobust(attributes, _ROBUST)
    for place in _PLACES:
        system.pthread_mutex_init(ctypes.byref(memory, place), attributes)
    system.pthread_mutexattr_destroy(attributes)


class Turns:
    def __init__(self, path: str, patience: float = PATIENCE) -> None:
        """`path` is that of a page which `make_page` has made."""
        self._memory = _mapped(Path(path))
        self._next, self._turn = (ctypes.byref(self._memory, place) for place in _PLACES)
        self._system = ctypes.CDLL(None)
        self._patience = patience

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Wait for a turn, and give it back; tells whether it was had in time.

        Whoever waits holds the right to be next, so that the one before cannot take two turns at a stretch.
        """
        at = time.time() + self._patience
        until = _Time(int(at), int(at % 1 * 1e9))
        held = False
        if self._lock(self._next, until):
            held = self._lock(self._turn, until)
            self._system.pthread_mutex_unlock(self._next)
        try:
            yield held
        finally:
            if held:
                self._system.pthread_mutex_unlock(self._turn)

    def _lock(self, mutex: object, until: _Time) -> bool:
        code = self._system.pthread_mutex_timedlock(mutex, ctypes.byref(until))
        if code == errno.EOWNERDEAD:  # what it guards is time, which is as good as before
            self._system.pthread_mutex_consistent(mutex)
            return True
        return code == 0


def _mapped(path: Path) -> ctypes.Array[ctypes.c_char]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)
    return (ctypes.c_char * _BYTES).from_buffer(memory)
