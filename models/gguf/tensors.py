"""The tensors of a GGUF file as the model's own checkpoint has them: its names, and no converter's changes.

Files are mapped: nothing is read before a piece is asked for, and of that no more than whole blocks. Blocks
come as bytes, which `models/quantization/readers/gguf.py` takes apart.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint.files import Source, Stored, place_of
from models.gguf.file import GgufTensor, read_gguf
from models.gguf.tensor_mapping import Place, placed_tensors
from models.plain_files import FileError
from models.quantization.methods.gguf import GGML_TYPES, GgmlType
from models.quantization.readers.gguf import widened_blocks
from models.weight_slices import Cut, WeightsError

_NUMBERS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_SIZES = {coding.name: coding for coding in GGML_TYPES.values()}


def open_gguf(path: Path) -> Source:
    """Open the tensors of a file, or of all its parts."""
    if sys.byteorder != "little":
        raise WeightsError(f"{path}: GGUF files are read on little-endian machines only")
    try:
        file = read_gguf(path)
        found = list(placed_tensors(file))
    except FileError as error:
        raise WeightsError(str(error)) from None
    mapped = {part: _mapped(part) for part in file.parts}
    tensors = {place.name: _Piece(tensor, place, mapped[tensor.file]).stored() for place, tensor in found}
    return Source(place_of([part.name for part in file.parts]), _joined_halves(tensors))


def _mapped(part: Path) -> Tensor:
    """All bytes of a file, of which none is read yet."""
    return torch.from_file(str(part), size=part.stat().st_size, dtype=torch.uint8)


class _Piece:
    """A tensor of the file, which reads pieces of itself as the model's own checkpoint has them."""

    def __init__(self, tensor: GgufTensor, place: Place, mapped: Tensor) -> None:
        self._tensor = tensor
        self._place = place
        self._mapped = mapped
        self._shape = tensor.shape if place.shape is None else place.shape
        self._coding: GgmlType = _SIZES[tensor.coding]

    def stored(self) -> Stored:
        shape, kind = self._shape, _NUMBERS.get(self._tensor.coding, self._tensor.coding)
        if self._is_turned:
            shape = shape[::-1]
        return Stored(shape, "float32" if self._is_changed else kind, self._tensor.file.name, self.read)

    def read(self, cut: Cut | None) -> Tensor:
        """Read a piece: numbers in their type, or blocks as bytes, which a cut by columns must not divide."""
        if cut is not None and self._is_turned:
            return self._cut(Cut(1 - cut.dim, cut.start, cut.stop)).t()
        read = self._cut(cut)
        if self._place.is_exponent:
            return read.float().neg().log()
        if self._place.shift:
            return read.float() - self._place.shift
        return read.t() if self._is_turned else read

    @property
    def _is_changed(self) -> bool:
        """Whether numbers are computed from those that lie there."""
        return self._place.is_exponent or bool(self._place.shift)

    @property
    def _is_turned(self) -> bool:
        """Whether the checkpoint has this matrix the other way round. Blocks are read as they lie."""
        return self._place.transposed and self._tensor.coding in _NUMBERS

    def _cut(self, cut: Cut | None) -> Tensor:
        stored = self._whole()
        if cut is not None and cut.dim == 1:
            stored = stored[:, self._width(cut.start) : self._width(cut.stop)]
        heads = self._place.heads
        if not heads:
            return stored if cut is None or cut.dim == 1 else stored[cut.start : cut.stop]
        rows = len(stored) // heads  # of a head, whose pairs of rows lie side by side
        start, stop = (cut.start, cut.stop) if cut is not None and cut.dim == 0 else (0, len(stored))
        first = start // rows
        whole = stored[first * rows : -(-stop // rows) * rows].unflatten(0, (-1, rows // 2, 2))
        return whole.transpose(1, 2).flatten(0, 2)[start - first * rows : stop - first * rows]

    def _whole(self) -> Tensor:
        """The tensor as it lies in the file: its numbers, or [rows, bytes]."""
        coding, name = self._coding, self._tensor.coding
        start = self._tensor.offset + self._place.first // coding.numbers * coding.nbytes
        data = self._mapped[start : start + prod(self._shape) // coding.numbers * coding.nbytes]
        if name not in _NUMBERS:
            return data.view(*self._shape[:-1], -1)
        kind = getattr(torch, _NUMBERS[name])
        if data.storage_offset() % kind.itemsize:  # an alignment that llama.cpp never writes
            data = data.clone()
        return data.view(kind).view(self._shape)

    def _width(self, column: int) -> int:
        """The place in a row where a column begins."""
        coding = self._coding
        return column if self._tensor.coding in _NUMBERS else column // coding.numbers * coding.nbytes


_KEYS, _VALUES, _WHOLE = (f".{name}_b_proj.weight" for name in ("k", "v", "kv"))


def _joined_halves(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Put one matrix of latent attention in the place of its halves, which newer files have: keys and values.

    A file that has it besides needs no halves. Keys are turned within each head, and their blocks lie along
    the other dimension, so that no block is one of the whole matrix: what is read is widened, as the model
    keeps this matrix in any case.
    """
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
                f"{list(shapes[1])}, which are not halves of one matrix: use a file that llama.cpp has made"
            )
        heads, value, rank = values.shape
        rows = heads * (keys.shape[2] + value)
        return Stored((rows, rank), "float32", keys.file, lambda cut: _read_both(keys, values, cut))


def _read_both(keys: Stored, values: Stored, cut: Cut | None) -> Tensor:
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
