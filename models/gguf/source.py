"""The tensors of a GGUF file as the model's own checkpoint has them: its names, and no converter's changes.

Files are mapped: nothing is read before a piece is asked for, and of that no more than whole blocks. Blocks
come as bytes, which `models/quantization/formats/gguf.py` takes apart.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint.files import Stored
from models.gguf.file import GgufTensor, read_gguf
from models.gguf.latent.halves import joined_halves
from models.gguf.names import Place, placed_tensors
from models.plain_files import FileError
from models.quantization.gguf_codings import CODINGS, BlockSize
from models.weight_pieces import Cut, WeightsError

_NUMBERS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_SIZES = {coding.name: coding for coding in CODINGS.values()}


class GgufSource:
    """The tensors of a file, or of all its parts."""

    def __init__(self, path: Path) -> None:
        if sys.byteorder != "little":
            raise WeightsError(f"{path}: GGUF files are read on little-endian machines only")
        try:
            file = read_gguf(path)
            found = list(placed_tensors(file))
        except FileError as error:
            raise WeightsError(str(error)) from None
        self.place = path.name if len(file.parts) == 1 else f"{path.name} and {len(file.parts) - 1} more"
        mapped = {part: _mapped(part) for part in file.parts}
        self.tensors: Mapping[str, Stored] = joined_halves(
            {place.name: _Piece(tensor, place, mapped[tensor.file]).stored() for place, tensor in found}
        )

    def find(self, name: str, shape: tuple[int, ...], kinds: Sequence[str]) -> Stored | None:
        return self.tensors.get(name)


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
        self._coding: BlockSize = _SIZES[tensor.coding]

    def stored(self) -> Stored:
        shape, kind = self._shape, _NUMBERS.get(self._tensor.coding, self._tensor.coding)
        if self._is_turned:
            shape = shape[::-1]
        return Stored(shape, "float32" if self._place.shift else kind, self._tensor.file.name, self.read)

    def read(self, cut: Cut | None) -> Tensor:
        """Read a piece: numbers in their type, or blocks as bytes, which a cut by columns must not divide."""
        if cut is not None and self._is_turned:
            return self._cut(Cut(1 - cut.dim, cut.start, cut.stop)).t()
        read = self._cut(cut)
        if self._place.shift:
            return read.float() - self._place.shift
        return read.t() if self._is_turned else read

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
