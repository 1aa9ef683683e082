"""Records of the cache on their way between a card and the host's pinned memory, beside steps.

A record is gathered from its parts in the device's memory, in line with steps, and travels in one piece on a
stream of its own. So a step may overwrite a block as soon as it is gathered, and no step waits for a copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from worker.cache_tiers.block_files import Bytes
from worker.capacity import GIB
from worker.host.memory import huge_pages

_CHUNK = GIB
"""The bytes that are pinned at once, which takes the system some tenths of a second."""
MOST_STAGED = 128 << 20
"""The bytes of the device's memory in which records are gathered, and those in which they come, at most."""
_MOST_AT_ONCE = 256
"""The most records that are saved at once."""

_log = logging.getLogger(__name__)


class Mark(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""
        ...


class Lane(Protocol):
    """Work of a device that is done in its order, such as a stream of CUDA."""

    def run(self, work: Callable[[], object]) -> None:
        """Have this done, behind all before it. Nobody waits."""
        ...

    def mark(self) -> Mark:
        """The point behind all before it."""
        ...

    def wait(self, mark: Mark) -> None:
        """Have all that follows done behind a point of another lane, too."""
        ...


class PinnedRecords:
    """Memory [slots, bytes] that the device reads and writes by itself; a thread makes it, chunk by chunk."""

    def __init__(self, slots: int, record_bytes: int, pin: Callable[[Tensor], Callable[[], object]]) -> None:
        """`pin`: a function that pins memory, and returns one that ends that."""
        self.slots, self.ready = slots, 0
        self.record_bytes, self._pin = record_bytes, pin
        self._at_once = max(1, _CHUNK // record_bytes)
        self._chunks: list[Tensor] = []
        self._unpin: list[Callable[[], object]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._make, name="pin-memory", daemon=True)
        self._thread.start()

    def __getitem__(self, slot: int) -> Tensor:
        return self._chunks[slot // self._at_once][slot % self._at_once]

    def close(self) -> None:
        """Give all back. Nothing may be under way."""
        self._closed = True
        self._thread.join()
        for unpin in self._unpin:
            unpin()
        self._chunks.clear()

    def _make(self) -> None:
        while self.ready < self.slots and not self._closed:
            count = min(self._at_once, self.slots - self.ready)
            try:
                chunk = huge_pages(count * self.record_bytes)
                self._unpin.append(self._pin(chunk))
            except (RuntimeError, OSError) as error:
                held = self.ready * self.record_bytes / GIB
                _log.warning("--kv-offloading-size: the system pins %.2f GiB and no more: %s", held, error)
                return
            self._chunks.append(chunk.view(count, -1))
            self.ready += count


class HostCopies:
    """The copies of records of which each part of the cache has a piece."""

    def __init__(
        self, parts: Sequence[Tensor], memory: PinnedRecords, steps: Lane, beside: Lane, most: int
    ) -> None:
        """`parts`: those of the cache [places, numbers, ...]. `beside`: the lane on which records travel.
        `most`: the records that are saved at once."""
        self._parts = [part.reshape(len(part), -1).view(torch.uint8) for part in parts]
        self._memory, self._steps, self._beside = memory, steps, beside
        self.slots, self.most, self.record_bytes = memory.slots, min(most, memory.slots), memory.record_bytes
        self._saved, self._coming = (
            torch.empty(most, self.record_bytes, dtype=torch.uint8, device=parts[0].device) for _ in range(2)
        )
        self._brought: Mark | None = None

    @property
    def ready(self) -> int:
        """The number of first slots that can be used already."""
        return self._memory.ready

    def record(self, slot: int) -> Bytes:
        """The bytes of a record in the host's memory."""
        return self._memory[slot].numpy()

    def save(self, places: Sequence[int], slots: Sequence[int]) -> Mark:
        """Copy records to the host as they are now. The next ones may be saved when these are there."""
        memory, saved = [self._memory[slot] for slot in slots], self._saved
        self._steps.run(lambda: self._gather(places, saved[: len(places)]))
        self._beside.wait(self._steps.mark())
        self._beside.run(lambda: _copy(memory, saved))
        return self._beside.mark()

    def bring(self, slots: Sequence[int], places: Sequence[int]) -> Mark:
        """Copy records back, behind what steps that were started do with these places."""
        started = self._steps.mark()
        for first in range(0, len(slots), self.most):
            some = slice(first, first + self.most)
            memory = [self._memory[slot] for slot in slots[some]]
            coming = self._coming[: len(memory)]
            self._beside.run(partial(_copy, coming, memory))
            self._beside.wait(started)
            self._beside.run(partial(self._scatter, places[some], coming))
        self._brought = self._beside.mark()
        return self._brought

    def guard(self) -> None:
        """Have later steps wait for all that is being brought."""
        if self._brought is not None:
            self._steps.wait(self._brought)

    def close(self) -> None:
        """Give all memory back, though others may know these copies still: an engine that sleeps does."""
        self._beside.mark().synchronize()
        self._memory.close()
        self._parts.clear()
        self._saved = self._coming = torch.empty(0)

    def _gather(self, places: Sequence[int], records: Tensor) -> None:
        index = _index(places, records)
        for part, piece in self._pieces(records):
            piece.copy_(part.index_select(0, index))

    def _scatter(self, places: Sequence[int], records: Tensor) -> None:
        index = _index(places, records)
        for part, piece in self._pieces(records):
            part.index_copy_(0, index, piece)

    def _pieces(self, records: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each part, and its pieces of some records, both as the widest numbers that fit."""
        widths = [part.shape[1] for part in self._parts]
        wide = torch.uint8 if any(width % 8 for width in widths) else torch.int64
        pieces = records.view(wide).split([width // wide.itemsize for width in widths], dim=1)
        return list(zip([part.view(wide) for part in self._parts], pieces, strict=True))


class AtOnce:
    """A lane of a device that computes in the host's memory, where all is done at once."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> AtOnce:
        return self

    def wait(self, mark: Mark) -> None:
        """Do nothing: all that was to be done is done."""

    def synchronize(self) -> None:
        """Do nothing, for the same reason."""


def make_copies(
    parts: Sequence[Tensor],
    nbytes: int,
    steps: Lane,
    beside: Lane,
    pin: Callable[[Tensor], Callable[[], object]],
) -> HostCopies | None:
    """Take so many bytes of the host's memory for records; None if not one has room there."""
    size = sum(part[0].nbytes for part in parts)
    if not (slots := nbytes // size):
        return None
    memory = PinnedRecords(slots, size, pin)
    return HostCopies(parts, memory, steps, beside, max(1, min(_MOST_AT_ONCE, MOST_STAGED // size)))


def _copy(targets: Sequence[Tensor] | Tensor, sources: Sequence[Tensor] | Tensor) -> None:
    for target, source in zip(targets, sources, strict=False):
        target.copy_(source, non_blocking=True)


def _index(places: Sequence[int], like: Tensor) -> Tensor:
    index = torch.tensor(places, dtype=torch.int64)
    return index.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else index
