"""Shortage of memory is told with its cause, and a worker in the place of a killed one knows of it."""

import errno
from pathlib import Path

import pytest

from worker.host import machine
from worker.host.machine import explain_shortage, times_killed

GIB = 1 << 30


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "address_limit", lambda: GIB)


SHORT = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: ..."),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]
OTHER = [ValueError("--block-size must be at least 1"), OSError(errno.EACCES, "Permission denied")]


@pytest.mark.parametrize("error", SHORT, ids=repr)
def test_memory_that_ran_out_is_told_with_what_to_do(error: Exception) -> None:
    told = explain_shortage(error)
    assert told is not None and "memory ran out" in told and "lower --kv-cache-memory-bytes" in told


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("error", [*SHORT, SystemError("error return without exception set")], ids=repr)
def test_a_limit_of_addresses_is_named(error: Exception) -> None:
    told = explain_shortage(error)
    assert told is not None and "1.00 GiB of addresses (ulimit -v)" in told and "raise the limit" in told


@pytest.mark.parametrize("error", OTHER, ids=repr)
def test_other_errors_tell_themselves(error: Exception, limit: None) -> None:
    assert explain_shortage(error) is None


def test_without_a_limit_an_unforeseen_error_is_no_shortage() -> None:
    assert explain_shortage(SystemError("error return without exception set")) is None


def test_a_worker_counts_the_kills_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([5, 6, 6, 7, 7])
    monkeypatch.setattr(machine, "kills_for_memory", lambda: next(kills))
    # Started, killed, ended in another way, killed; and a worker in another place.
    counts = [times_killed(str(tmp_path), "worker") for _ in range(4)]
    assert counts == [0, 1, 1, 2]
    assert times_killed(str(tmp_path), "rank 1") == 0


@pytest.mark.parametrize("content", ["", "{", '{"kills": "x"}'])
def test_a_note_that_cannot_be_read_counts_nothing(content: str, tmp_path: Path) -> None:
    times_killed(str(tmp_path), "worker")
    (note,) = tmp_path.iterdir()
    note.write_text(content)
    assert times_killed(str(tmp_path), "worker") == 0


def test_without_a_folder_nothing_is_noted(tmp_path: Path) -> None:
    assert times_killed("", "worker") == 0
    assert times_killed(str(tmp_path / "elsewhere"), "worker") == 0
