"""The memory from which a store copies its records, and into which it brings them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from worker.disk.block_files import Bytes

_RECORD = 1 << 16
"""The bytes of a record of an encoding at most, unless a single embedding has more."""
_MOST_RECORDS = 1 << 24
"""More records than an encoding has."""


class RecordMemory(Protocol):
    """Memory in which records of one size have places."""

    @property
    def record_bytes(self) -> int: ...
    def copy(self, place: int, into: Bytes) -> bool:
        """Copy a record to the beginning of `into` -> whether it was there."""
        ...

    def bring(self, place: int, record: Bytes) -> None:
        """Put a record that begins these bytes into its place."""
        ...


class BlockPieces:
    """Blocks, or states, of which each part of the cache has a piece: [blocks, bytes] in each part."""

    def __init__(self, pieces: Sequence[Bytes]) -> None:
        self._pieces = pieces
        self.record_bytes = sum(piece.shape[1] for piece in pieces)

    def copy(self, place: int, into: Bytes) -> bool:
        at = 0
        for piece in self._pieces:
            into[at : at + piece.shape[1]] = piece[place]
            at += piece.shape[1]
        return True

    def bring(self, place: int, record: Bytes) -> None:
        at = 0
        for piece in self._pieces:
            piece[place] = record[at : at + piece.shape[1]]
            at += piece.shape[1]


class Encodings:
    """What a tower made of media items, which have any number of embeddings: each is cut into records.

    The rest of an item's last record is zeros. What comes back waits here until a step takes it.
    """

    def __init__(self, find: Callable[[int], Bytes | None], record_bytes: int) -> None:
        """`find`: a function that returns the bytes of all embeddings of the item with a number, if the
        worker holds them. They do not change."""
        self.record_bytes = record_bytes
        self._find = find
        self._brought: dict[int, dict[int, Bytes]] = {}
        """number -> the records that have come, by their index."""

    def copy(self, place: int, into: Bytes) -> bool:
        number, index = divmod(place, _MOST_RECORDS)
        found = self._find(number)
        if found is None:
            return False
        record = found[index * self.record_bytes :][: self.record_bytes]
        into[: len(record)] = record
        into[len(record) :] = 0
        return True

    def bring(self, place: int, record: Bytes) -> None:
        number, index = divmod(place, _MOST_RECORDS)
        self._brought.setdefault(number, {})[index] = record[: self.record_bytes].copy()

    def take(self, number: int, nbytes: int) -> Bytes:
        """The bytes of an item that has come, of which nothing is kept here any more; 0 bytes: it is not
        wanted. Raises ValueError if some are missing."""
        records = self._brought.pop(number, {})
        if not nbytes:
            return np.zeros(0, np.uint8)
        if len(records) * self.record_bytes < nbytes:
            raise ValueError(f"{nbytes} bytes of item {number} were to come from disk, and some have not")
        return np.concatenate([records[index] for index in range(len(records))])[:nbytes]


def record_place(number: int, index: int) -> int:
    """The place of a record of the item with this number."""
    return number * _MOST_RECORDS + index


def rows_in_record(row_bytes: int) -> int:
    """The embeddings in a record, if each has so many bytes."""
    return max(1, _RECORD // row_bytes)
