"""Memory in huge pages, and pieces of it."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from worker.host.pages import Arena, huge_pages

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not _ENABLED.exists() or "[never]" in _ENABLED.read_text(), reason="this system has no huge pages"
)
def test_large_pieces_are_in_huge_pages() -> None:
    memory = huge_pages(8 << 20)
    memory.fill_(1)
    address = memory.data_ptr()
    entries = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for entry in entries:
        start, stop = (int(end, 16) for end in entry.split(maxsplit=1)[0].split("-"))
        if start <= address < stop:
            kilobytes = re.search(r"^AnonHugePages:\s+(\d+) kB", entry, re.MULTILINE)
            assert kilobytes is not None
            assert int(kilobytes[1]) >= 2048  # how many there are depends on what else runs
            return
    pytest.fail("the memory is not mapped")


def test_pieces_are_apart_and_aligned() -> None:
    arena = Arena()
    pieces = [arena.take(nbytes) for nbytes in (1, 100, 5 << 20, 63, 40 << 20, 50 << 20, 64)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    assert [int(piece[0]) for piece in pieces] == list(range(len(pieces)))
    assert [int(piece[-1]) for piece in pieces] == list(range(len(pieces)))


_STEPS = """
import resource
from concurrent.futures import ThreadPoolExecutor
import torch
from worker.host.pages import keep_freed

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(1 << 20) for _ in range(6)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed()
with ThreadPoolExecutor(1) as thread:
    print([thread.submit(step).result() for _ in range(10)][-1])
"""
"""In a thread, as steps are, whose heap shrinks more readily. The first few steps find their places."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its heap keeps what it likes to")
def test_what_a_step_frees_is_there_for_the_next_with_its_pages() -> None:
    """In a process of its own: this one's heap may hold more than is kept already."""
    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # those of one tensor are 1,000
