"""Pictures that clients have encoded: their embeddings are checked, and laid out like those of the tower."""

from __future__ import annotations

from math import prod

import numpy as np
from msgspec.structs import replace

from models.media.item import MediaError, Prepared, Processor
from server.media.picture_decoding import from_base64
from server.media.tensor_files import is_matrix, read_tensor

_NO_GRID = (1, 0, 0)
"""A grid without patches, of which no picture has embeddings where its grid says how many it has."""
_MOST_PATCHES = 1 << 12
"""The most patches that may become one embedding."""


def read_encoded(file: bytes, grid: str, width: int, processor: Processor) -> Prepared:
    """The item that a file of embeddings in base64 becomes. `grid`: three numbers with commas between, such a
    file with them, or nothing. Raises MediaError."""
    try:
        rows, sides = read_tensor(from_base64(file)), _read_grid(grid)
    except MemoryError:
        raise
    except Exception:  # libraries raise whatever they like for files that anybody may have written
        raise MediaError(
            "image_embeds is the base64 of a file of torch.save, safetensors or numpy.save with one "
            f"contiguous tensor [embeddings, {width}] in float32, float16 or bfloat16, and image_grid_thw a "
            "list of three whole numbers, or the base64 of such a file with them."
        ) from None
    return encoded(rows, sides, width, processor)


def _read_grid(grid: str) -> tuple[int, ...]:
    if not grid or "," in grid:
        return tuple(map(int, grid.split(","))) if grid else ()
    return tuple(int(value) for value in read_tensor(from_base64(grid.encode())).ravel())


def encoded(rows: np.ndarray | None, sides: tuple[int, ...], width: int, processor: Processor) -> Prepared:
    """The item that float32 embeddings [N, width] become. `sides`: its grid, or nothing. Raises
    MediaError."""
    rows = rows[0] if rows is not None and rows.ndim == 3 and len(rows) == 1 else rows
    if not processor.placeholder:
        raise MediaError("This model compares pictures with texts: send pictures, not image_embeds.")
    if rows is None or rows.dtype != np.float32 or not is_matrix(rows, width):
        shape = "" if rows is None else f", and these have the shape {list(rows.shape)}"
        raise MediaError(
            f"image_embeds are finite numbers in rows of {width}, for each embedding one{shape}."
        )
    count = len(rows)
    grid = (sides[0], sides[1], sides[2]) if len(sides) == 3 else _NO_GRID
    item = Prepared("encoded", memoryview(rows.tobytes()), (count, width, 4), grid, count)
    possible = not sides or (min(grid) > 0 and prod(grid) <= count * _MOST_PATCHES)
    wanted = sum(length for _, length in processor.layout(item).embeddings) if possible else 0
    if not count or wanted != count:
        told = f"image_grid_thw {list(sides)}" if sides else "no image_grid_thw"
        raise MediaError(
            f"A picture with {told} has {wanted} embeddings of this model, and image_embeds has {count}: the "
            "grid is the frames, rows and columns of patches, of models whose pictures have any shape."
        )
    return item if sides else replace(item, grid=(1, 1, count))
