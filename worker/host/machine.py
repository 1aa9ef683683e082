"""Processor cores, memory and a folder for caches that this process may use, within the limits of containers.

This module imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores within the affinity mask, bounded by the cgroup's processor quota; at least 1.

    Two threads of one core share its arithmetic units, so hyper-threads are counted once.
    """
    allowed = _allowed_cpus()
    cores = {_siblings(root, cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(root)))


def cache_folder() -> Path:
    """The folder for compiled kernels and tokenizers, which are made once and used again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "facet"


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be taken without swapping, in this container as on the machine.

    A container's use counts the files that were read in it, such as a checkpoint. The kernel drops those
    pages when others are needed.
    """
    available = _meminfo(root, "MemAvailable")
    for group in _cgroups(root):
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used + _file_pages(group)))
    return available


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of this machine's memory, or of this container's share of it."""
    limits = [limit for group in _cgroups(root) if (limit := _number(group / "memory.max")) is not None]
    return min([_meminfo(root, "MemTotal"), *limits])


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of this processor's core, as the kernel lists them; else this processor alone."""
    text = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return text if text is not None else str(cpu)


def _quota(root: Path) -> int:
    """Whole processors that the tightest cgroup above this process grants."""
    quota = os.cpu_count() or 1
    for group in _cgroups(root):
        text = _text(group / "cpu.max")
        if text is not None and not text.startswith("max"):
            runtime, period = map(int, text.split())
            quota = min(quota, runtime // period)
    return quota


def _meminfo(root: Path, field: str) -> int:
    """Bytes in a field of /proc/meminfo; all memory where there is no such file."""
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroups(root: Path) -> Iterator[Path]:
    """This process's cgroup (version 2) and those above it: a limit of any of them holds."""
    base = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            group = base / line.removeprefix("0::").lstrip("/")
            yield group
            while group != base:
                group = group.parent
                yield group


def _file_pages(group: Path) -> int:
    """Bytes of files that lie in a cgroup's memory, and can be read again."""
    counted = dict(line.split() for line in (_text(group / "memory.stat") or "").splitlines())
    return sum(int(counted.get(name, 0)) for name in ("active_file", "inactive_file"))


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
