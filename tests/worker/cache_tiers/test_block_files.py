"""Bytes of files of blocks: they are written as the system's large pages lie."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from worker.cache_tiers.block_files import LARGE_PAGE, write_all


@pytest.mark.parametrize("most", [2**31, 700_001])
def test_no_write_crosses_a_large_page_and_all_bytes_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """`most`: what the system takes of a write."""
    pieces = [os.urandom(size) for size in (1000, 0, LARGE_PAGE, 3 * LARGE_PAGE + 7, 1, 5)]
    pieces += [bytes([n % 256]) for n in range(3000)]  # more than one call takes
    written: list[tuple[int, int]] = []
    pwritev = os.pwritev

    def write(file: int, views: Sequence[memoryview], at: int) -> int:
        data = b"".join(views)
        written.append((at, at + len(data)))
        return pwritev(file, [data[:most]], at)

    monkeypatch.setattr(os, "pwritev", write)
    with (tmp_path / "blocks").open("w+b") as file:
        write_all(file.fileno(), pieces)
        assert file.read() == b"".join(pieces)
    assert all(start // LARGE_PAGE == (end - 1) // LARGE_PAGE for start, end in written)
    assert most < LARGE_PAGE or len(written) < 10
