"""The cores and memory that a machine and its containers grant, read from a made-up /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.host.machine import available_memory, cache_folder, total_memory, usable_cores

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def four_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two cores of two hardware threads each, and a core of its own outside the affinity mask."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    siblings = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3", 4: "4"}
    name = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return write(tmp_path, {name.format(cpu): text for cpu, text in siblings.items()})


def test_hardware_threads_of_a_core_count_once(four_threads: Path) -> None:
    assert usable_cores(four_threads) == 2


def test_unknown_topology_counts_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert usable_cores(tmp_path) == 3


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", 2)])
def test_quota_of_a_group_above_bounds_the_cores(four_threads: Path, quota: str, cores: int) -> None:
    groups = {
        "proc/self/cgroup": "0::/pod/container",
        "sys/fs/cgroup/pod/cpu.max": quota,
        "sys/fs/cgroup/pod/container/cpu.max": "max 100000",
    }
    assert usable_cores(write(four_threads, groups)) == cores


def test_memory_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    meminfo = f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {16 * GIB // 1024} kB"
    write(tmp_path, {"proc/meminfo": meminfo})
    assert available_memory(tmp_path) == 16 * GIB
    assert total_memory(tmp_path) == 32 * GIB
    groups = {
        "proc/self/cgroup": "1:cpu:/x\n0::/box",
        "sys/fs/cgroup/box/memory.max": str(6 * GIB),
        "sys/fs/cgroup/box/memory.current": str(2 * GIB),
        "sys/fs/cgroup/memory.max": "max",
    }
    assert available_memory(write(tmp_path, groups)) == 4 * GIB
    assert total_memory(tmp_path) == 6 * GIB
    write(tmp_path, {"sys/fs/cgroup/box/memory.current": str(7 * GIB)})
    assert available_memory(tmp_path) == 0


def test_files_that_were_read_leave_a_container_its_memory(tmp_path: Path) -> None:
    stat = f"anon {GIB}\nactive_file {GIB // 2}\ninactive_file {3 * GIB}\nshmem {GIB // 4}"
    files = {
        "proc/meminfo": f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {16 * GIB // 1024} kB",
        "proc/self/cgroup": "0::/box",
        "sys/fs/cgroup/box/memory.max": str(6 * GIB),
        "sys/fs/cgroup/box/memory.current": str(5 * GIB),
        "sys/fs/cgroup/box/memory.stat": stat,
    }
    assert available_memory(write(tmp_path, files)) == 4.5 * GIB


def test_this_machine_answers() -> None:
    assert usable_cores() >= 1
    assert 0 < available_memory() <= total_memory()


def test_caches_lie_where_the_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/somebody/.cache/facet")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/facet")
