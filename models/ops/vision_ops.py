"""The first operation of towers, on the pixels of pictures, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def patches(pixels: Tensor, levels: Tensor, side: int, *, depth: int = 1, merge: int = 1) -> Tensor:
    """Cut frames into square patches of normalised numbers: [F, height, width, 3] uint8 -> [P, numbers].

    levels [3, 256]: the number that stands for each value of each channel. A patch has the numbers of `side`
    rows and columns of `depth` frames, by channel, frame, row and column; the last frame is repeated where
    frames are missing. Patches come frame by frame and row by row, or with `merge` square by square of so
    many rows and columns of patches. Pixels beyond the last whole patch, or square, are left out.
    """
    if missing := -len(pixels) % depth:
        pixels = torch.cat([pixels, *[pixels[-1:]] * missing])
    square = side * merge
    rows, columns = pixels.shape[1] // square, pixels.shape[2] // square
    whole = pixels[:, : rows * square, : columns * square]
    cut = whole.reshape(-1, depth, rows, merge, side, columns, merge, side, 3)
    ordered = cut.permute(
        0, 2, 5, 3, 6, 8, 1, 4, 7
    )  # frames, square, patch in it, channel, depth, row, column
    codes = ordered.reshape(-1, 3, depth * side * side).int()
    codes += torch.arange(0, 3 * 256, 256, dtype=torch.int32, device=pixels.device).unsqueeze(-1)
    return levels.flatten().index_select(0, codes.flatten()).view(len(codes), -1)
