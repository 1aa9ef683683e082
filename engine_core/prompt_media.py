"""The media of a prompt, as requests bring them to an engine."""

from __future__ import annotations

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
    """The height and the width in pixels, and 3."""
    grid: Grid
    pixels: Buffer
    """The RGB values row by row, one byte each."""
