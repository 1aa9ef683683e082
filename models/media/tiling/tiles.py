"""Cutting pictures into square tiles, each of which a tower takes as a picture of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from models.media.item import MediaError, Picture, Prepared


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
    pixels, (width, height) = b"".join(tile.tobytes() for tile in tiles), tiles[0].size
    return Prepared("image", memoryview(pixels), (height * len(tiles), width, 3), grid, embeddings)


def frames_as_tiles(
    frames: Iterable[Picture], side: int, resample: int, patches: int, embeddings: int
) -> Prepared:
    """The item of a video, each of whose frames is brought to a tile of so many patches and embeddings."""
    tiles = [frame.resize((side, side), resample) for frame in frames]
    item = stacked(tiles, (len(tiles), patches, patches), len(tiles) * embeddings)
    return msgspec.structs.replace(item, kind="video")


def check_frames(count: int, embeddings: int, most_embeddings: int) -> None:
    """Raise MediaError if a video of so many frames needs too many embeddings, each so many."""
    if count * embeddings > most_embeddings:
        raise MediaError(
            f"A video may become {most_embeddings} tokens at most, and this one becomes "
            f"{count * embeddings}: ask for fewer frames."
        )


def shapes_of(least: int, most: int) -> list[tuple[int, int]]:
    """The columns and rows that `least` to `most` tiles may have, the fewest tiles first."""
    shapes = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    few = [shape for shape in shapes if least <= shape[0] * shape[1] <= most]
    return sorted(few, key=lambda shape: shape[0] * shape[1]) or [(1, 1)]


def nearest_shape(shapes: Sequence[tuple[int, int]], side: int, width: int, height: int) -> tuple[int, int]:
    """The columns and rows of tiles whose ratio is nearest; among equal ones the most tiles of which the
    picture would fill more than half."""
    best, least = (1, 1), float("inf")
    for shape in shapes:
        distance = abs(width / height - shape[0] / shape[1])
        fills = width * height > 0.5 * side**2 * shape[0] * shape[1]
        if distance < least or (distance == least and fills):
            best, least = shape, distance
    return best
