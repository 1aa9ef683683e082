"""The media of a prompt, as requests bring them to an engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from models.media.item import Kind
from worker.buffers import Buffer
from worker.protocol import Grid, Runs


class Media(msgspec.Struct, frozen=True, gc=False):
    """A media item in a prompt."""

    hash: bytes
    """A digest of its file and of all that decides what becomes of it. Equal ones are encoded once."""
    kind: Kind
    at: int
    """The position of the first token that stands for it."""
    length: int
    """The number of these tokens, some of which may be text, such as the ends of rows."""
    runs: Runs
    """The positions, counted from `at`, in whose place its embeddings are put, in order."""
    shape: tuple[int, int, int]
    """The height of all tiles or frames together and the width in pixels, and 3."""
    grid: Grid
    pixels: Buffer
    """The RGB values row by row, one byte each."""
    interval: float = 1.0
    """How far the frames of the grid lie apart on the axis of time."""

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.at + self.length

    @property
    def embeddings(self) -> int:
        return sum([count for _, count in self.runs])


def overlapping(media: Sequence[Media], start: int, stop: int) -> Sequence[Media]:
    """Find the media, of those in order, that have a token at positions [start, stop)."""
    if not media:
        return ()
    first = bisect_right(media, start, key=_end)
    behind = first
    while behind < len(media) and media[behind].at < stop:
        behind += 1
    return media[first:behind]


def _end(media: Media) -> int:
    return media.end
