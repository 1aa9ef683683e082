"""The cores and memory that a machine and its containers grant, read from a made-up /proc and /sys."""

import os
from pathlib import Path

import pytest

from worker.host import machine
from worker.host.machine import (
    available_memory,
    cache_folder,
    kills_for_memory,
    process_age,
    total_memory,
    usable_cores,
)

GIB = 1 << 30
MEMINFO = {"proc/meminfo": f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {16 * GIB // 1024} kB"}


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
    write(tmp_path, MEMINFO)
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
        **MEMINFO,
        "proc/self/cgroup": "0::/box",
        "sys/fs/cgroup/box/memory.max": str(6 * GIB),
        "sys/fs/cgroup/box/memory.current": str(5 * GIB),
        "sys/fs/cgroup/box/memory.stat": stat,
    }
    assert available_memory(write(tmp_path, files)) == 4.5 * GIB


def test_limits_of_version_1(four_threads: Path) -> None:
    """It has a tree for each resource. What has no limit has the largest number of pages."""
    stat = (
        f"active_file 0\ntotal_active_file {GIB // 2}\ntotal_inactive_file {GIB}\nhierarchical_memory_limit 1"
    )
    files = {
        **MEMINFO,
        "proc/self/cgroup": "4:memory:/pod/box\n2:cpu,cpuacct:/pod/box\n1:name=systemd:/pod/box\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(20 * GIB),
        "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": str(6 * GIB),
        "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": str(5 * GIB),
        "sys/fs/cgroup/memory/pod/memory.stat": stat,
        "sys/fs/cgroup/memory/pod/box/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/pod/box/cpu.cfs_quota_us": "-1",
    }
    write(four_threads, files)
    assert total_memory(four_threads) == 6 * GIB
    assert available_memory(four_threads) == 2.5 * GIB
    assert usable_cores(four_threads) == 1


def test_a_container_of_version_1_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    """The path is the host's, and means nothing inside."""
    files = {
        **MEMINFO,
        "proc/self/cgroup": "2:cpuacct,memory:/docker/0123",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(650 << 20),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(100 << 20),
    }
    assert available_memory(write(tmp_path, files)) == 550 << 20


def test_a_limit_of_addresses_is_one_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {**MEMINFO, "proc/self/statm": f"{GIB // os.sysconf('SC_PAGE_SIZE')} 1 1"})
    monkeypatch.setattr(
        machine.resource, "getrlimit", lambda which: (3 * GIB, machine.resource.RLIM_INFINITY)
    )
    assert available_memory(tmp_path) == 2 * GIB
    assert total_memory(tmp_path) == 3 * GIB


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"proc/self/cgroup": "0::/box", "sys/fs/cgroup/box/memory.events": "oom 4\noom_kill 3"}, 3),
        ({"proc/self/cgroup": "4:memory:/", "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 2"}, 2),
        ({"proc/vmstat": "pgfault 9\noom_kill 7"}, 7),
        ({}, 0),
    ],
)
def test_what_was_killed_is_counted_by_the_kernel(files: dict[str, str], kills: int, tmp_path: Path) -> None:
    assert kills_for_memory(write(tmp_path, files)) == kills


def test_this_machine_answers() -> None:
    assert usable_cores() >= 1
    assert 0 < available_memory() <= total_memory()


def test_caches_lie_where_the_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/somebody/.cache/facet")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/facet")


def test_a_user_without_a_home_has_a_cache_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder().name == f"facet-{os.getuid()}"


def test_the_age_of_a_process_is_what_the_kernel_says(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    state = f"7 (a ) b) S {' '.join(['0'] * 18)} {30 * ticks} 0"
    write(tmp_path, {"proc/self/stat": state, "proc/uptime": "42.50 80.00"})
    assert process_age(tmp_path) == 12.5
    assert process_age(tmp_path / "elsewhere") == 0.0
