"""The matrix that makes keys and values of latents, of its halves: newer files have one tensor for each.

The half of keys is turned within each head, and its blocks lie along the other dimension, so that no block of
it is one of the whole matrix. What is read is widened, as the model keeps this matrix in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint.files import Stored
from models.quantization.formats.gguf import widened_blocks
from models.weight_pieces import Cut, WeightsError

_KEYS, _VALUES, _WHOLE = (f".{name}_b_proj.weight" for name in ("k", "v", "kv"))


def joined_halves(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Put one matrix in the place of two halves. A file that has it besides needs no halves."""
    found = dict(tensors)
    ends = (_KEYS, _VALUES)
    for scope in sorted({name.removesuffix(end) for name in tensors for end in ends if name.endswith(end)}):
        halves = [found.pop(scope + end, None) for end in ends]
        if scope + _WHOLE not in tensors:
            found[scope + _WHOLE] = _Halves(scope, *halves).stored()
    return found


@dataclass(frozen=True)
class _Halves:
    """Keys [heads, rank, nope] and values [heads, value, rank] of one layer."""

    scope: str
    keys: Stored | None
    values: Stored | None

    def stored(self) -> Stored:
        keys, values = self.keys, self.values
        if keys is None or values is None:
            there, missing = ("v_b_proj", "k_b_proj") if keys is None else ("k_b_proj", "v_b_proj")
            raise WeightsError(f"{self.scope} has {there}, and {missing} is missing in the file")
        shapes = keys.shape, values.shape
        if [len(shape) for shape in shapes] != [3, 3] or (shapes[0][:2] != shapes[1][::2]):
            raise WeightsError(
                f"{keys.file}: {self.scope} has keys of the shape {list(shapes[0])} and values of "
                f"{list(shapes[1])}, which are no halves of one matrix: use a file that llama.cpp has made"
            )
        heads, value, rank = values.shape
        rows = heads * (keys.shape[2] + value)
        return Stored((rows, rank), "float32", keys.file, lambda cut: _read(keys, values, cut))


def _read(keys: Stored, values: Stored, cut: Cut | None) -> Tensor:
    """Read a piece of the whole matrix, and of the halves the heads that it touches."""
    heads, each = keys.shape[0], keys.shape[2] + values.shape[1]
    start, stop = (cut.start, cut.stop) if cut is not None and cut.dim == 0 else (0, heads * each)
    first = start // each
    touched = Cut(0, first, -(-stop // each))
    whole = torch.cat([_numbers(keys, touched).transpose(1, 2), _numbers(values, touched)], dim=1)
    rows = whole.flatten(0, 1)[start - first * each : stop - first * each]
    return cut.of(rows) if cut is not None and cut.dim == 1 else rows


def _numbers(half: Stored, heads: Cut) -> Tensor:
    read = half.read(heads)
    if read.is_floating_point():
        return read.float()
    return widened_blocks(read.flatten(0, 1), half.dtype).view(*read.shape[:2], -1)
