"""A card in the host's memory whose copies come late: each when it is waited for, which spoils its buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from worker.devices.pinned import PinnedUpload

HOST = torch.device("cpu")


class LateCopies:
    """A stream of copies, in their order. What becomes of the buffers is noted in `log`."""

    def __init__(self, *, late: bool = True) -> None:
        """`late`: False makes a copy when it is started, and spoils its buffer when it is waited for."""
        self.log: list[str] = []
        self.buffers = 0
        self._late = late
        self._left: deque[tuple[Tensor, Tensor]] = deque()
        self._started = self._made = 0

    def make_buffer(self, nbytes: int) -> Tensor:
        self.buffers += 1
        return torch.full([nbytes], 255, dtype=torch.uint8)

    def start(self, held: Tensor, place: Tensor) -> LateCopy:
        self._started += 1
        self.log.append(f"start {self._started}")
        self._left.append((held, place))
        if not self._late:
            place.copy_(held)
        return LateCopy(self, self._started)

    def wait(self, number: int) -> None:
        """Make all copies up to that of this number."""
        self.log.append(f"wait {number}")
        while self._made < number:
            held, place = self._left.popleft()
            if self._late:
                place.copy_(held)
            held.view(-1).view(torch.uint8).fill_(255)
            self._made += 1

    def finish(self) -> None:
        self.wait(self._started)


class LateCopy:
    def __init__(self, copies: LateCopies, number: int) -> None:
        self._copies, self._number = copies, number

    def synchronize(self) -> None:
        self._copies.wait(self._number)


@contextmanager
def late_upload(copies: LateCopies, buffer_bytes: int) -> Iterator[PinnedUpload]:
    with ThreadPoolExecutor(2, thread_name_prefix="read-weights") as threads:
        yield PinnedUpload(HOST, threads, copies.start, copies.make_buffer, buffer_bytes)
