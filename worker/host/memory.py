"""Memory of the host: huge pages, pages made ahead of use, and what loading and steps leave behind.

A page is made when it is first written. On a virtual machine that can take longer than computing what is
written, so who makes pages, when, and who keeps them is decided here.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from pathlib import Path

import torch
from torch import Tensor

_HUGE = 2 << 20
_PAGE = 4096
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
"""The advice to make pages, since Linux 5.14. An older system refuses it, and pages are made when needed."""
_MOMENT = 1.0
"""The seconds for which a start makes pages at most."""
_MAPS = Path("/proc/self/maps")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # in malloc.h
_MOST_KEPT, _LARGEST_IN_HEAP = 1 << 30, 32 << 20  # the second is the most that glibc allows


def huge_pages(nbytes: int) -> Tensor:
    """Untouched bytes, in huge pages where the system has them: they are read up to 1.5 times as fast."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Private: memory that could be shared, as Python makes it otherwise, gets no huge pages.
        pages = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel built without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    else:
        pages = mmap.mmap(-1, nbytes + _HUGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % _HUGE
    return memory[start : start + nbytes]


class Arena:
    """A source of pieces of memory in huge pages. A chunk of 64 MiB is freed with the last of its pieces."""

    _CHUNK = 64 << 20
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        wanted = -(-nbytes // self._ALIGNMENT) * self._ALIGNMENT
        if wanted > self._CHUNK // 2:
            return huge_pages(nbytes)
        if wanted > len(self._rest):
            self._rest = huge_pages(self._CHUNK)
        piece, self._rest = self._rest[:nbytes], self._rest[wanted:]
        return piece


class Pages:
    """The pages of a cache where memory has them from the start: nothing makes them."""

    def start(self, blocks: int = 0) -> None: ...
    def follow(self, blocks: Iterable[int]) -> None: ...
    def make(self, blocks: int) -> None: ...
    def close(self) -> None: ...


class PageToucher(Pages):
    """A thread that makes the pages of cache blocks before a step writes to them.

    Within the step that took a tenth of a second for 256 tokens of a 0.6B model. The thread keeps an eighth
    of the cache ahead of the last block in use, and no more: much of a cache may never be needed.
    """

    _SHARE_AHEAD = 8

    def __init__(self, parts: Sequence[Tensor], blocks: int) -> None:
        """`parts`: contiguous tensors [blocks + 1, ...], each with a share of every block and a spare one."""
        self._parts = parts
        self._blocks = blocks
        self._lead = blocks // self._SHARE_AHEAD
        self._at_once = max(1, _HUGE * len(parts) // sum(part[0].nbytes for part in parts))
        self._wanted = 0  # blocks, counted from the first
        self._begun = 0  # pieces of so many blocks of a part, counted through all parts of the first blocks
        self._under_way: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._system = ctypes.CDLL(None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page-toucher")

    def start(self, blocks: int = 0) -> None:
        """Make the first pages before there is a step: most servers wait a while for their first request.

        Those of the first `blocks`, a quarter of all at most, are expected to be needed by that one: this
        thread makes them, too, and returns when they are there, or after a moment.
        """
        blocks = min(blocks, self._blocks // 4)
        self._want(max(self._lead, blocks))
        self.make(blocks, _MOMENT)

    def follow(self, blocks: Iterable[int]) -> None:
        """Keep ahead of the blocks of a step: they are given out in order, until all have been in use."""
        for block in blocks:
            if self._wanted <= min(block + self._lead, self._blocks - 1) and block < self._blocks:
                self._want(block + self._lead + self._at_once)

    def make(self, blocks: int, seconds: float = inf) -> None:
        """Return when the first `blocks` have pages, or after so many seconds.

        All threads that call this make them, each others: those that write to the same page at the same time
        would all make it.
        """
        until = time.monotonic() + seconds
        stop = -(-blocks // self._at_once) * len(self._parts)
        while time.monotonic() < until and (piece := self._claim(stop)) is not None:
            place, part = divmod(piece, len(self._parts))
            self._touch(self._parts[part][place * self._at_once : (place + 1) * self._at_once])
            with self._changed:
                self._under_way.discard(piece)
                self._changed.notify_all()
        with self._changed:
            left = None if until == inf else max(0.0, until - time.monotonic())
            self._changed.wait_for(lambda: min(self._under_way, default=stop) >= stop, left)

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown()

    def _want(self, blocks: int) -> None:
        self._wanted = min(blocks, self._blocks)
        self._thread.submit(self.make, self._wanted)

    def _claim(self, stop: int) -> int | None:
        """The next piece before this one, if nobody has begun it."""
        with self._changed:
            if self._begun >= stop or self._closed:
                return None
            self._under_way.add(self._begun)
            self._begun += 1
            return self._begun - 1

    def _touch(self, piece: Tensor) -> None:
        start = piece.data_ptr() // _PAGE * _PAGE
        length = piece.data_ptr() + piece.nbytes - start
        self._system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)


def keep_freed_memory() -> None:
    """Have the heap keep what a step frees from now on, so that the next step finds it there, with its pages.

    Otherwise each step would give its tensors back and have new pages made for the same ones: up to a sixth
    of the time of a step of 1,000 tokens. Tensors beyond 32 MB still do.
    """
    system = ctypes.CDLL(None)
    if hasattr(system, "mallopt"):  # only glibc has it
        system.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
        system.mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)


class ReadPages:
    """Gives the pages of a checkpoint's files back while other parts of them are read.

    Mapped files count as memory of this process: loading would need room for them beside the weights.
    """

    _PARTS = 64

    def __init__(self, folder: Path, least: int = 64 << 20) -> None:
        """`least`: the fewest bytes that are given back at once, which takes a millisecond."""
        size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
        self._parts = min(self._PARTS, size // least)
        self._names = _mapped_names(folder)
        self._given_back = 0

    def follow(self, fraction: float) -> None:
        """Give pages back whenever another part of the files has been read; `fraction` of them is done."""
        if int(fraction * self._parts) > self._given_back:
            self._given_back = int(fraction * self._parts)
            _give_back(self._names)


def release_after_loading(folder: Path) -> None:
    """Give back what loading leaves in memory though nobody reads it any more: mapped files, and free heap.

    As long as one tensor of a file is in use where it lies, such as embeddings, all its pages that were read
    count as this process's memory, also those whose tensors have been packed or moved since. The heap keeps
    what lies below anything that is still in use: 0.3 bytes for each byte of packed weights.
    """
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):  # only glibc has it
        system.malloc_trim(0)
    _give_back(_mapped_names(folder))


def _mapped_names(folder: Path) -> tuple[str, ...]:
    """The ends of lines that tell where a folder's files are mapped; in a hub's cache they are links."""
    return tuple(f" {path.resolve()}" for path in folder.iterdir())


def _give_back(names: tuple[str, ...]) -> None:
    """Give back all pages of mapped files; one that is read again comes from the file."""
    if not _MAPS.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in _MAPS.read_text().splitlines():  # one for each piece of this process's memory
        if line.endswith(names):
            start, stop = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
            madvise(start, stop - start, _MADV_DONTNEED)
