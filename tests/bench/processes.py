"""Processor time and memory of a tree of processes, as Linux counts them."""

from __future__ import annotations

import os
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """The processes that descend from `root`, and itself."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for above in found:
        found += [pid for pid, parent in parents.items() if parent == above]
    return found


def command(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def cpu_seconds(*pids: int) -> float:
    """Seconds of user and system time so far. A process that has ended meanwhile counts as nothing."""
    return sum(int(fields[11]) + int(fields[12]) for pid in pids if (fields := _stat(pid))) / _TICK


def resident_mib(*pids: int) -> float:
    """Bytes of memory that belong to them, shared pages in proportion (PSS)."""
    return sum(_pss_kib(pid) for pid in pids) / 1024


def _pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _stat(pid: int) -> list[str]:
    """The fields of a process's stat file after its name: state, parent, and so on; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
