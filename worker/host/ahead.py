"""The pages of a cache in the host's memory, made before they are needed.

A page is made when it is first written, and on a virtual machine that can take longer than computing what is
written: a tenth of a second for a prompt of 256 tokens of a 0.6B model. So a thread makes those of the blocks
that come next, an eighth of the cache ahead of the last one in use. Not all of them: much of a cache may
never be needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from worker.protocol import StepInput

_SHARE_AHEAD = 8
_HUGE = 2 << 20
_PAGE = 4096
_POPULATE_WRITE = 23
"""Of madvise, since Linux 5.14. An older one refuses it, and pages are made when they are needed."""


class Ahead:
    def __init__(self, parts: Sequence[Tensor], blocks: int) -> None:
        """`parts`: each in one piece, with its share of every block and of a spare one [blocks + 1, ...]."""
        self._parts = parts
        self._blocks = blocks
        self._lead = blocks // _SHARE_AHEAD
        self._at_once = max(1, _HUGE * len(parts) // sum(part[0].nbytes for part in parts))
        self._wanted = self._made = 0  # blocks, from the first on
        self._closed = False
        self._system = ctypes.CDLL(None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    def begin(self) -> None:
        """Before there is a step to follow: most servers wait a while for their first request."""
        self._want(self._lead)

    def follow(self, step: StepInput) -> None:
        """Blocks are given out in order, until all have been in use."""
        for seq in step.seqs:
            for block in seq.blocks:
                if self._wanted <= min(block + self._lead, self._blocks - 1) and block < self._blocks:
                    self._want(block + self._lead + self._at_once)

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown()

    def _want(self, blocks: int) -> None:
        self._wanted = min(blocks, self._blocks)
        self._thread.submit(self._make, self._wanted)

    def _make(self, wanted: int) -> None:
        while self._made < wanted and not self._closed:
            stop = min(self._made + self._at_once, wanted)
            for part in self._parts:
                if not self._closed:
                    self._touch(part[self._made : stop])
            self._made = stop

    def _touch(self, piece: Tensor) -> None:
        start = piece.data_ptr() // _PAGE * _PAGE
        length = piece.data_ptr() + piece.nbytes - start
        self._system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)
