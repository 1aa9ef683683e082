"""Writes the stacks of processes to stderr, so that a person sees what each does; tells who is stopped."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from worker.child import DUMP_STACKS

_PROCESSES = Path("/proc")


def dump_all() -> None:
    """Dump the stacks of this process and, on Linux, of all its descendants that do so at the signal."""
    faulthandler.dump_traceback()
    for pid in descendants(os.getpid()):
        _dump(pid)


def dump(pid: int) -> None:
    """Dump the stacks of a process and of its descendants, on Linux. Those that are stopped cannot."""
    for one in (pid, *descendants(pid)):
        _dump(one)


def _dump(pid: int) -> None:
    with suppress(OSError):
        if _catches_signal(pid):
            os.kill(pid, DUMP_STACKS)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, as Linux says; False where nobody says so."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"T"
    except OSError:
        return False


def descendants(pid: int) -> Iterator[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in _PROCESSES.glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(entry.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    frontier = [pid]
    while frontier:
        below = children.get(frontier.pop(), [])
        frontier += below
        yield from below


def _catches_signal(pid: int) -> bool:
    """Whether a process catches the signal, which would end it otherwise: a compiler, or one that begins."""
    status = (_PROCESSES / str(pid) / "status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (DUMP_STACKS - 1) & 1)
