"""Memory in huge pages, and pieces of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from worker.kernels.memory import Arena, huge_pages

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
