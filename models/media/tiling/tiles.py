"""Cutting pictures into square tiles, each of which a tower takes as a picture of its own."""

from __future__ import annotations

from collections.abc import Sequence

from models.media.item import Picture, Prepared


def cut(picture: Picture, side: int, rows: int, columns: int) -> list[Picture]:
    """The tiles of a picture, row by row. A picture smaller than they are lies in the middle, on black."""
    left, top = (columns * side - picture.width) // 2, (rows * side - picture.height) // 2
    return [
        picture.crop((x - left, y - top, x - left + side, y - top + side))
        for y in range(0, rows * side, side)
        for x in range(0, columns * side, side)
    ]


def stacked(tiles: Sequence[Picture], grid: tuple[int, int, int], embeddings: int) -> Prepared:
    """The item of tiles of one size."""
    return Prepared(
        kind="image",
        pixels=memoryview(b"".join(tile.tobytes() for tile in tiles)),
        shape=(tiles[0].height * len(tiles), tiles[0].width, 3),
        grid=grid,
        embeddings=embeddings,
    )
