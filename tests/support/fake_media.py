"""Media items for tests of the engine, whose pixels are as many as their shape says."""

from __future__ import annotations

from engine_core.prompt_media import Media
from worker.buffers import Buffer
from worker.protocol import Runs


def picture(
    hash: bytes, at: int, length: int, runs: Runs | None = None, pixels: bytes | None = None
) -> Media:
    """A picture in place of `length` tokens, all of them embeddings unless `runs` says which."""
    pixels = bytes(3) if pixels is None else pixels
    shape = (1, len(pixels) // 3, 3)
    return Media(hash, "image", at, length, runs or ((0, length),), shape, (1, 1, 1), Buffer(pixels))
