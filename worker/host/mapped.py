"""What stays in memory after loading though nobody reads it any more: pages of files, pieces of the heap.

A file is mapped as a whole. As long as one tensor of it is in use where it lies, such as embeddings, all
pages that were read count as this process's memory, those too whose tensors have been packed or moved since.
The heap keeps what lies below anything that is still in use: 0.3 bytes for each byte of packed weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4
_MAPS = Path("/proc/self/maps")


def let_go(folder: Path) -> None:
    """Give both back to the system. A page of the folder's files that is read again comes from the file."""
    if not _MAPS.exists():
        return
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):  # of glibc
        system.malloc_trim(0)
    madvise = system.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    files = {str(path.resolve()) for path in folder.iterdir()}  # in a hub's cache they are links
    for start, stop in _mappings(files):
        madvise(start, stop - start, _MADV_DONTNEED)


def _mappings(files: set[str]) -> Iterator[tuple[int, int]]:
    for line in _MAPS.read_text().splitlines():
        *_, path = line.split(maxsplit=5)
        if path in files:
            start, stop = line.split(maxsplit=1)[0].split("-")
            yield int(start, 16), int(stop, 16)
