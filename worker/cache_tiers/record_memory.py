"""The memory from which a store copies its records, and into which it brings them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from worker.cache_tiers.block_files import Bytes

if TYPE_CHECKING:
    from torch import Tensor


class BlockMemory(Protocol):
    """The memory of blocks."""

    @property
    def parts(self) -> Sequence[Tensor]: ...
    @property
    def pieces(self) -> Sequence[Bytes]: ...
    def make_pages(self, blocks: int) -> None: ...


class RecordMemory(Protocol):
    """Memory in which records of one size have places."""

    @property
    def record_bytes(self) -> int: ...
    def copy(self, place: int, into: Bytes) -> None:
        """Copy a record to the beginning of `into`."""
        ...

    def bring(self, place: int, record: Bytes) -> None:
        """Put a record that begins these bytes into its place."""
        ...


class BlockPieces:
    """Blocks, or states, of which each part of the cache has a piece: [blocks, bytes] in each part."""

    def __init__(self, pieces: Sequence[Bytes]) -> None:
        self._pieces = pieces
        self.record_bytes = sum(piece.shape[1] for piece in pieces)

    def copy(self, place: int, into: Bytes) -> None:
        at = 0
        for piece in self._pieces:
            into[at : at + piece.shape[1]] = piece[place]
            at += piece.shape[1]

    def bring(self, place: int, record: Bytes) -> None:
        at = 0
        for piece in self._pieces:
            piece[place] = record[at : at + piece.shape[1]]
            at += piece.shape[1]
