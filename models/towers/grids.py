"""The order in which patches lie, and what each one's place among them means."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import isqrt
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int, int]
"""The frames, and the rows and columns in each, of patches or of squares of them."""


@lru_cache(maxsize=8)
def square_by_square(grid: Grid, merge: int) -> Tensor:
    """The row and the column of each patch [2, P] int64, in the order of `ops.patches` with `merge`.

    Pages and frames mostly have the same grid, whose places are kept: nobody may write to them.
    """
    frames, rows, columns = grid
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    squares = places.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3)
    return squares.reshape(2, -1).repeat(1, frames)


def window_by_window(grid: Grid, side: int) -> tuple[Tensor, list[int]]:
    """The numbers of the cells of a grid [frames * rows * columns], window by window, and the windows' sizes.
    Windows have `side` rows and columns of one frame, and fewer at its edges."""
    frames, rows, columns = grid
    in_row = -(-columns // side)
    window = (torch.arange(rows) // side * in_row).unsqueeze(1) + torch.arange(columns) // side
    order, sizes = window.flatten().argsort(stable=True), window.flatten().bincount()
    first = torch.arange(frames).unsqueeze(1) * (rows * columns)
    return (first + order).flatten(), sizes.tolist() * frames


@lru_cache(maxsize=8)
def between_cells(grid: Grid, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Lay a grid, corner on corner, over a table of `side` x `side` entries.

    -> the four entries around each patch [4, P], in the order of `square_by_square`, and their shares."""
    around: list[list[tuple[Tensor, Tensor]]] = []
    for place, count in zip(square_by_square(grid, merge), grid[1:], strict=True):
        at = place.float() * (side - 1) / max(count - 1, 1)
        low = at.floor().long()
        share = at - low
        around.append([(low, 1 - share), ((low + 1).clamp(max=side - 1), share)])
    pairs = [
        (row * side + column, of_row * of_column) for (row, of_row), (column, of_column) in product(*around)
    ]
    entries, shares = zip(*pairs, strict=True)
    return torch.stack(entries), torch.stack(shares)


def resized_table(table: Tensor, shape: tuple[int, int], mode: Literal["bilinear", "bicubic"]) -> Tensor:
    """Fit a square table of learned positions [side**2, size] to a grid of this shape [rows * columns, size].
    Corners are not aligned, and where the grid is coarser its entries are means of more of the table's."""
    side = isqrt(len(table))
    if shape == (side, side):
        return table
    channels_first = table.view(side, side, -1).permute(2, 0, 1).unsqueeze(0).float()
    fitted = F.interpolate(channels_first, shape, mode=mode, antialias=True)[0]
    return fitted.flatten(1).t().to(table.dtype)
