"""Processor cores, memory and a folder for caches that this process may use, within the limits of containers;
what it means that memory ran out; and what the variables of the environment say of the system. No torch.
"""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from worker.capacity import GIB


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores, not hyper-threads, within the affinity mask and the cgroup's quota; at least 1."""
    every = set(range(os.cpu_count() or 1))
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every
    cores = {_siblings(root, cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(root)))


def cache_folder() -> Path:
    """The folder for compiled kernels and tokenizers, which are made once and used again."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "facet"
    except RuntimeError:  # no home, as for users that exist in a container alone
        return Path(tempfile.gettempdir()) / f"facet-{os.getuid()}"


def environment_with(**variables: str) -> dict[str, str]:
    """The variables of this process and some more, for a program that it starts."""
    return {**os.environ, **variables}


def hides_cards(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the operator hides all NVIDIA cards from programs for CUDA."""
    return environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def wants_plain_text(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the user asks all programs for text without colours, as no-color.org describes."""
    return bool(environ.get("NO_COLOR"))


def service_manager(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> tuple[str, float]:
    """The socket at which systemd waits for notices, if any, and its patience in seconds; 0 has no end."""
    microseconds, watched = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID")
    is_watched = microseconds.isdecimal() and watched in (None, str(os.getpid() if pid is None else pid))
    return environ.get("NOTIFY_SOCKET", ""), int(microseconds) / 1e6 if is_watched else 0.0


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be taken without swapping, in this container as on the machine.

    A container's use counts the files that were read in it, such as a checkpoint. The kernel drops those
    pages when others are needed.
    """
    available = _meminfo(root, "MemAvailable")
    for group in _cgroups(root, "memory"):
        limit = _memory_limit(group)
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used + _file_pages(group)))
    if (limit := address_limit()) is not None:
        pages = int((_text(root / "proc/self/statm") or "0").split()[0])
        available = min(available, max(0, limit - pages * os.sysconf("SC_PAGE_SIZE")))
    return available


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of this machine's memory, or of this container's or process's share of it."""
    limits = [address_limit(), *map(_memory_limit, _cgroups(root, "memory"))]
    return min([_meminfo(root, "MemTotal"), *(limit for limit in limits if limit is not None)])


def address_limit() -> int | None:
    """Bytes of addresses that this process may have (`ulimit -v`), or None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def why_too_few_addresses() -> str | None:
    """Why nothing can be served here, if the limit of addresses is below what an engine's libraries take."""
    limit = address_limit()
    if limit is None or limit >= LEAST_ADDRESSES:
        return None
    return (
        f"a process may have {limit / GIB:.2f} GiB of addresses (ulimit -v), and an engine without a model "
        f"takes {LEAST_ADDRESSES / GIB:.1f}: raise the limit, or set none (ulimit -v unlimited)"
    )


def own_memory(pid: int, root: Path = Path("/")) -> int:
    """Bytes of memory of a process, of what it shares with others its part; 0 if the system does not say."""
    for line in (_text(root / f"proc/{pid}/smaps_rollup") or "").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def process_age(root: Path = Path("/")) -> float:
    """The seconds since this process was started; 0 if the system does not say."""
    fields = (_text(root / "proc/self/stat") or "").rpartition(")")[2].split()
    uptime = (_text(root / "proc/uptime") or "").split()
    if len(fields) < 20 or not uptime:
        return 0.0
    return max(0.0, float(uptime[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def kills_for_memory(root: Path = Path("/")) -> int:
    """The number of processes that the kernel has killed because memory ran out: in this container, if it
    counts there, else on this machine. It only grows."""
    for group in _cgroups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _counted(group / name).get("oom_kill")) is not None:
                return count
    return _counted(root / "proc/vmstat").get("oom_kill", 0)


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of this processor's core, as the kernel lists them; else this processor alone."""
    return _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _quota(root: Path) -> int:
    """Whole processors that the tightest cgroup above this process grants."""
    quota = os.cpu_count() or 1
    for group in _cgroups(root, "cpu"):
        text = _text(group / "cpu.max")
        if text is not None:
            runtime, period = (int(word) if word.isdigit() else None for word in text.split())
        else:
            runtime, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if runtime is not None and period:
            quota = min(quota, runtime // period)
    return quota


def _meminfo(root: Path, field: str) -> int:
    """Bytes in a field of /proc/meminfo; all memory where there is no such file."""
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroups for a resource, and those above them: a limit of any of them holds.

    Version 2 has one tree for all resources, version 1 one for each, or for several that share it.
    """
    base = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controllers
        if controllers and not top.exists():
            top = base / controller
        group = top / path.lstrip("/")
        yield group
        while group != top:
            group = group.parent
            yield group


def _memory_limit(group: Path) -> int | None:
    return _number(group / "memory.max", group / "memory.limit_in_bytes")


def _file_pages(group: Path) -> int:
    """Bytes of files that lie in a cgroup's memory, and can be read again."""
    counted = _counted(group / "memory.stat")  # in version 1, only the totals are of the groups below, too
    names = "active_file", "inactive_file"
    return sum(counted.get(f"total_{name}", counted.get(name, 0)) for name in names)


def _counted(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line."""
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(*paths: Path) -> int | None:
    """The number in the first of these files that has one."""
    texts = map(_text, paths)
    return next((int(text) for text in texts if text is not None and text.isdigit()), None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


LEAST_ADDRESSES = 1200 << 20
"""Bytes of addresses below which an engine on a CPU never starts: its libraries map so much."""
_NOT_MAPPED = ("failed to map segment", "cannot allocate memory", "can't allocate memory", "can't start new")
"""Words of the system, of its loader, of torch and of Python."""
_NO_MEMORY = ("OutOfMemoryError", "allocate memory", "out of memory")
"""Words of torch's errors, which are plain RuntimeErrors on a CPU."""


class OutOfMemory(OSError):
    """A worker cannot start because memory ran out; the message says what to do."""


class _Note(msgspec.Struct, frozen=True):
    """The note that a worker leaves behind."""

    kills: int
    """The processes that had been killed when it began."""
    times: int
    """How many workers before it were killed."""


def explain_shortage(error: Exception) -> str | None:
    """A sentence for the operator if a start failed because memory ran out, or most likely did."""
    limit = address_limit()
    ran_out = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    ran_out = ran_out or any(words in str(error).lower() for words in _NOT_MAPPED)
    # Libraries that get no addresses fail in ways of their own.
    if limit is not None and (ran_out or not isinstance(error, (ValueError, OSError))):
        return (
            f"this process may have {limit / GIB:.2f} GiB of addresses (ulimit -v), and they are used up; "
            f"libraries alone take {LEAST_ADDRESSES / GIB:.1f}: raise the limit, or set none"
        )
    if ran_out:
        return (
            f"memory ran out, with {available_memory() / GIB:.1f} GiB available now: take a smaller model, "
            "or lower --kv-cache-memory-bytes or --max-num-seqs"
        )
    return None


def is_short_of_memory(error: Exception) -> bool:
    """Whether a step failed for want of memory, in Python, on a CPU or on another device."""
    return isinstance(error, MemoryError) or any(words in repr(error) for words in _NO_MEMORY)


def forget_files(folder: Path) -> None:
    """Have the system drop what its cache holds of the files of a folder, as far as nobody uses them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        with suppress(OSError), open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def times_killed(folder: str, name: str) -> int:
    """How many workers of this run have been killed in the place `name` because memory ran out.

    The kernel counts them. Each worker leaves its count in the run's folder, and the next one compares.
    """
    if not folder:
        return 0
    path, kills = Path(folder) / f"memory of {name}", kills_for_memory()
    times = 0
    with suppress(OSError, msgspec.DecodeError):
        before = msgspec.json.decode(path.read_bytes(), type=_Note)
        times = before.times + (kills > before.kills)
    with suppress(OSError):  # a folder of another machine
        path.write_bytes(msgspec.json.encode(_Note(kills, times)))
    return times
