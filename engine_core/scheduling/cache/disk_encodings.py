"""Encodings of media items on disk: written once a step has made them, and read instead of made again.

An encoding is found by the hash of its item, whatever prompt the item stands in. It is cut into records of
one size, each under a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from engine_core.scheduling.media import MediaItems
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_cost import ENCODED, CostLine
from models.media.item import CLIENT_MADE
from worker.disk.block_read import BlockRead
from worker.disk.disk import Disk
from worker.disk.record_memory import record_place

_MOST_UNWRITTEN = 1 << 16
"""The records that wait to be written at most, if a disk does not keep up."""


@dataclass(slots=True, eq=False)
class Arrival:
    """An item whose encoding is being read from disk, perhaps for several sequences."""

    encodings: DiskEncodings
    hash: bytes
    read: BlockRead
    is_over: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_over or self.read.done.is_set()

    def end(self, now: float) -> None:
        """Use what has come, if that is all; further calls do nothing."""
        if not self.is_over:
            self.is_over = True
            self.encodings.land(self, now)


class DiskEncodings:
    def __init__(self, disk: Disk, media: MediaItems, line: CostLine) -> None:
        self.disk = disk
        self._media, self._line = media, line
        self.unwritten: dict[bytes, None] = {}
        """The names of records that are to be written, the oldest first; some may be dropped since."""
        self._places: dict[bytes, int] = {}
        """The place of each of these in the worker."""
        self._arrivals: dict[bytes, Arrival] = {}
        media.encoding_landed = self._publish

    def _publish(self, hash: bytes, number: int, embeddings: int) -> None:
        """Have an encoding written that the worker holds."""
        for index, name in enumerate(self._names(hash, embeddings)):
            self.unwritten[name] = None
            self._places[name] = record_place(number, index)
        while len(self.unwritten) > _MOST_UNWRITTEN:
            name = next(iter(self.unwritten))
            del self.unwritten[name], self._places[name]

    def find(self, name: bytes) -> int | None:
        """Return where the worker has a record that is to be written, once."""
        return self._places.pop(name, None)

    def fetch(self, seq: Sequence, start: int) -> tuple[list[Arrival], float]:
        """Have the encodings read that a sequence needs from position `start` on, if that is quicker than
        making them -> and the seconds in which they would be made."""
        found: dict[bytes, Arrival] = {}
        seconds = 0.0
        for item in seq.request.media:
            if item.end <= start or item.kind in CLIENT_MADE or item.hash in found:
                continue
            arrival = self._arrivals.get(item.hash) or self._read(item.hash, item.embeddings)
            if arrival is not None:
                found[item.hash] = arrival
                seconds += self._line.end(ENCODED, item.embeddings)
        return [*found.values()], seconds

    def _read(self, hash: bytes, embeddings: int) -> Arrival | None:
        names = [*self._names(hash, embeddings)]
        if self._media.holds(hash) or not all(name in self.disk for name in names):
            return None
        if self.disk.pace.expected(len(names)) > self._line.end(ENCODED, embeddings):
            self.disk.pace.doubt()
            return None
        if (number := self._media.expect(hash)) is None:
            return None
        read = BlockRead(names, [record_place(number, index) for index in range(len(names))])
        arrival = self._arrivals[hash] = Arrival(self, hash, read)
        self.disk.read(read)
        return arrival

    def land(self, arrival: Arrival, now: float) -> None:
        """End the read of an item, whose encoding is used if all of it has come."""
        del self._arrivals[arrival.hash]
        self.disk.end(arrival.read, now)
        self._media.arrive(arrival.hash, loaded=all(arrival.read.loaded))

    def forget(self) -> None:
        """Write nothing that is to be written; what is being read is of no use."""
        self.unwritten.clear()
        self._places.clear()
        self._media.give_up_arrivals()

    def _names(self, hash: bytes, embeddings: int) -> Iterable[bytes]:
        for index in range(-(-embeddings // self._media.record_embeddings)):
            yield blake2b(hash + index.to_bytes(4, "little"), digest_size=32).digest()
